from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from offload.checkpoint.export import export
from offload.checkpoint.extra import memory_of
from offload.checkpoint.tensors import DTYPES, Entry
from offload.errors import BudgetError, ConfigError, PathError, TierIOError
from offload.io.engine import IOFile
from offload.io.files import Files

INDEX = "model.safetensors.index.json"


def entry(name: str, tensor: Tensor, pieces: int = 1) -> Entry:
    def give() -> Iterator[memoryview]:
        data = memory_of(tensor)
        size = -(-len(data) // pieces) or 1
        for start in range(0, len(data), size):
            yield data[start : start + size]

    return Entry(name, tensor.dtype, tuple(tensor.shape), give)


def loaded(directory: Path) -> dict[str, Tensor]:
    """As transformers does it: by the index if there is one."""
    found = {}
    if (directory / INDEX).exists():
        index = json.loads((directory / INDEX).read_text())
        names = sorted(set(index["weight_map"].values()))
        for name in names:
            with safe_open(directory / name, "pt") as file:
                assert file.metadata() == {"format": "pt"}
                for key in file.keys():  # noqa: SIM118
                    assert index["weight_map"][key] == name
                    found[key] = file.get_tensor(key)
        assert found.keys() == index["weight_map"].keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        return found
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "model.embed.weight": torch.randn(37, 5).bfloat16(),
        "model.layers.0.weight": torch.randn(3, 4, 5),
        "model.layers.0.bias": torch.randn(()),
        "model.norm": torch.randn(7).half(),
        "none": torch.zeros(0, 4),
        "é": torch.arange(3),
        "flag": torch.tensor([True, False, True]),
    }


@pytest.mark.parametrize("shard_bytes", [1, 100, 400, 1000, 10**9])
@pytest.mark.parametrize("pieces", [1, 7])
def test_what_is_exported_loads_with_safetensors(tmp_path: Path, shard_bytes: int, pieces: int) -> None:
    files = export(
        tmp_path / "out",
        [entry(name, tensor, pieces) for name, tensor in tensors().items()],
        shard_bytes=shard_bytes,
    )
    found = loaded(tmp_path / "out")
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    for file in files:
        if file.suffix == ".safetensors" and len(files) > 2:
            with safe_open(file, "pt") as shard:
                keys = list(shard.keys())
            assert len(keys) == 1 or sum(tensors()[key].nbytes for key in keys) <= shard_bytes


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_what_is_exported_is_for_whom_the_umask_lets_read_it(tmp_path: Path, umask: int) -> None:
    entries = [entry(name, tensor) for name, tensor in tensors().items()]
    before = os.umask(umask)
    try:
        export(tmp_path / "ours", entries, shard_bytes=100)
        torch.save(tensors(), tmp_path / "theirs")
        (tmp_path / "folder").mkdir()
    finally:
        os.umask(before)
    assert {file.stat().st_mode for file in (tmp_path / "ours").iterdir()} == {(tmp_path / "theirs").stat().st_mode}
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "folder").stat().st_mode


def test_the_names_are_those_that_transformers_looks_for(tmp_path: Path) -> None:
    entries = [entry(str(number), torch.ones(10)) for number in range(3)]
    shards = export(tmp_path / "three", entries, shard_bytes=40)
    assert [path.name for path in shards] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        INDEX,
    ]
    assert [path.name for path in export(tmp_path / "one", entries)] == ["model.safetensors"]
    assert [path.name for path in export(tmp_path / "one", entries, stem="exp_avg")] == ["exp_avg.safetensors"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (2, 2 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw.bool() if dtype == torch.bool else raw.view(dtype)
    export(tmp_path / "out", [entry("odd", torch.ones(3, dtype=torch.uint8)), entry("x", tensor)])
    found = loaded(tmp_path / "out")["x"]
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_data_is_aligned_in_the_file_and_else_in_the_order_given(tmp_path: Path) -> None:
    entries = [entry("a", torch.ones(3, dtype=torch.uint8)), entry("c", torch.ones(3)), entry("b", torch.ones(1))]
    export(tmp_path / "out", entries)
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    known = json.loads(data[8 : 8 + length])
    places = {name: known[name]["data_offsets"] for name in ("a", "b", "c")}
    assert places == {"c": [0, 12], "b": [12, 16], "a": [16, 19]}


def test_shards_are_filled(tmp_path: Path) -> None:
    entries = [entry(str(number), torch.ones(10)) for number in range(7)]
    assert len(export(tmp_path / "out", entries, shard_bytes=100)) == 4 + 1


def test_an_empty_export_is_one_empty_file(tmp_path: Path) -> None:
    export(tmp_path / "out", [])
    assert loaded(tmp_path / "out") == {}


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    def big(number: int) -> Entry:
        return Entry(
            f"w{number}", torch.float32, (32, 1 << 18), lambda: (memoryview(bytes(1 << 20)) for _ in range(32))
        )

    tracemalloc.start()
    export(tmp_path / "out", [big(number) for number in range(3)], shard_bytes=1 << 26)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_other_files_stay_and_a_finished_export_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    export(tmp_path, [entry("a", torch.ones(3))])
    before = (tmp_path / "model.safetensors").read_bytes()
    for shard_bytes in (1, 100):
        with pytest.raises(PathError, match="already") as caught:
            export(tmp_path, [entry("a", torch.zeros(3)), entry("b", torch.ones(3))], shard_bytes=shard_bytes)
        assert caught.value.filename == str(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", INDEX])
def test_a_part_of_another_export_is_not_mixed_with_this_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(PathError) as caught:
        export(tmp_path, [entry("a", torch.zeros(3))])
    assert caught.value.filename == str(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_an_export_that_was_killed_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.offload.new").write_text("half")
    (tmp_path / "model.safetensors.new").write_text("mine")
    export(tmp_path, [entry("a", torch.ones(3))])
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "model.safetensors.new"}
    assert (tmp_path / "model.safetensors.new").read_text() == "mine"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_directory_that_was_made_is_durable_too(tmp_path: Path, is_new: bool) -> None:
    synced = []

    class Noted(Files):
        def sync_directory(self, path: Path) -> None:
            synced.append(path)
            super().sync_directory(path)

    out = tmp_path / "out"
    if not is_new:
        out.mkdir()
    export(out, [entry("a", torch.ones(3))], files=Noted())
    assert synced == [out, tmp_path][: 1 + is_new]


def test_a_directory_whose_neighbours_nobody_may_list_is_exported_to(tmp_path: Path) -> None:
    class Unreadable(Files):
        def sync_directory(self, path: Path) -> None:
            if path == tmp_path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            super().sync_directory(path)

    export(out := tmp_path / "out", [entry("a", torch.ones(3))], files=Unreadable())
    assert load_file(out / "model.safetensors")["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["file", "no parent", "dangling symlink"])
def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "out"
    if kind == "file":
        place.write_text("mine")
    elif kind == "no parent":
        place = place / "deeper"
    else:
        place.symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(PathError) as caught:
        export(place, [entry("a", torch.ones(3))])
    assert caught.value.filename == str(place)
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_directory_above_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathError, match=rf"{tmp_path / 'a'} does not exist: make it first \(mkdir -p {tmp_path}/a/b\)"):
        export(tmp_path / "a" / "b" / "out", [entry("a", torch.ones(3))])


REFUSED: list[tuple[list[Entry], dict[str, object], str]] = [
    ([entry("a", torch.ones(1)), entry("a", torch.ones(1))], {}, "another tensor has that name"),
    ([entry("__metadata__", torch.ones(1))], {}, "reserved"),
    ([entry("a", torch.ones(1, dtype=torch.complex128))], {}, "complex128"),
    ([], {"shard_bytes": 0}, "shard_bytes=0"),
    ([], {"stem": "../model"}, "stem"),
    ([], {"stem": ""}, "stem"),
]


@pytest.mark.parametrize(("entries", "options", "match"), REFUSED, ids=[match for _, _, match in REFUSED])
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, entries: list[Entry], options: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        export(tmp_path / "out", entries, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [0, 11, 13])
def test_pieces_of_another_size_than_the_tensor_leave_nothing(tmp_path: Path, given: int) -> None:
    wrong = Entry("a", torch.float32, (3,), lambda: [memoryview(bytes(given))])
    with pytest.raises(ValueError, match="12 bytes"):
        export(tmp_path / "out", [entry("b", torch.ones(3)), wrong], shard_bytes=12)
    assert not (tmp_path / "out").exists()


class Failing(Files):
    """Fails the n-th call of one operation."""

    def __init__(self, operation: str, number: int) -> None:
        super().__init__()
        self.left = number
        self.operation = operation

    def _count(self, operation: str) -> None:
        if operation == self.operation:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, file: IOFile, data: memoryview) -> None:
        self._count("write")
        super().write(file, data)

    def sync(self, file: IOFile) -> None:
        self._count("sync")
        super().sync(file)

    def rename(self, old: Path, new: Path) -> None:
        self._count("rename")
        super().rename(old, new)


@pytest.mark.parametrize(
    ("operation", "number"), [("write", 1), ("write", 3), ("sync", 2), ("rename", 1), ("rename", 4)]
)
def test_a_full_disk_leaves_nothing(tmp_path: Path, operation: str, number: int) -> None:
    (tmp_path / "mine").write_text("mine")
    entries = [entry(str(n), torch.ones(10)) for n in range(3)]
    with pytest.raises(TierIOError, match="No space left"):
        export(tmp_path, entries, shard_bytes=40, files=Failing(operation, number))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_export_that_was_killed_before_its_last_file_is_not_taken_for_whole(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Kill(Files):
        def rename(self, old: Path, new: Path) -> None:
            if new.name == INDEX:
                raise Killed
            super().rename(old, new)

        def remove(self, path: Path) -> None:
            if path.name in names():
                raise Killed
            super().remove(path)

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    with pytest.raises(Killed):
        export(tmp_path, [entry(str(n), torch.ones(10)) for n in range(3)], shard_bytes=40, files=Kill())
    assert "model-00003-of-00003.safetensors" in names()
    assert INDEX not in names()
    assert "model.safetensors" not in names()


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    def never() -> Iterable[memoryview]:
        raise AssertionError("nothing may be asked for")

    with pytest.raises(BudgetError) as caught:
        export(tmp_path / "out", [Entry("a", torch.float32, (1 << 44,), never)])
    assert caught.value.needed == 1 << 46
    assert caught.value.option == "directory"
    assert not (tmp_path / "out").exists()
