"""Files that claim to be somebody's weights or settings: an error of this library that names the file, at once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offload import ConfigError, OffloadZero
from offload.cli.convert import convert
from offload.io.remembered import cache_file
from offload.io.select import Settings, recall, remember
from tests.attacks.corpus import JSON_OF_OTHERS

pytestmark = pytest.mark.timeout(60)  # what waits for a FIFO waits for ever

INDEX = "model.safetensors.index.json"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def leads_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def leads_to_itself(path: Path) -> None:
    path.symlink_to(path)


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")


NO_FILES = [fifo, endless, folder, leads_nowhere, leads_to_itself, huge, unreadable]


def taken(init: Path) -> None:
    """Builds a model of two parameters with values from `init`."""
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    try:
        OffloadZero(model, tier="cpu", init=init).close()
    except BaseException:
        assert all(param.is_meta for param in model.parameters())  # it was not changed
        raise


def write_index(folder: Path, file: str) -> None:
    (folder / INDEX).write_text(f'{{"weight_map": {{"weight": "{file}", "bias": "{file}"}}}}')


def from_index(path: Path) -> None:
    taken(path.parent)


def from_settings(path: Path) -> None:
    """What is remembered is taken if it makes sense, and else not."""
    assert recall(path.parent) is None


def converted(path: Path) -> None:
    convert(path)


READERS: dict[str, tuple[str, Callable[[Path], None], type[Exception] | None]] = {
    "an index": (INDEX, from_index, ConfigError),
    "an index that is named": ("weights.json", taken, ConfigError),
    "what was measured": (cache_file().name, from_settings, None),
    "DeepSpeed's configuration": ("ds_config.json", converted, ConfigError),
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "offload").mkdir()
    return tmp_path / "offload"  # type: ignore[return-value]


def refused(reader: str, path: Path) -> None:
    _, read, error = READERS[reader]
    with contextlib.nullcontext() if error is None else pytest.raises(error) as found:
        read(path)
    if found is not None:
        assert path.name in str(found.value)
        assert len(str(found.value)) < 1000


@pytest.mark.parametrize("document", JSON_OF_OTHERS)
@pytest.mark.parametrize("reader", READERS)
def test_json_that_says_nothing_is_refused_by_the_name_of_its_file(reader: str, document: str, directory: Path) -> None:
    path = directory / READERS[reader][0]
    path.write_bytes(JSON_OF_OTHERS[document])
    refused(reader, path)


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_of_a_reasonable_size_is_refused_and_not_waited_for(
    reader: str, make: Callable[[Path], None], directory: Path
) -> None:
    path = directory / READERS[reader][0]
    make(path)
    refused(reader, path)


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_weights_that_are_no_file_are_refused_and_not_waited_for(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / name)
    if "of" in name:
        write_index(tmp_path, name)
    with pytest.raises(ConfigError, match=name):
        taken(tmp_path)


@pytest.mark.parametrize("weights", ["[]", "1", "null", '{"weight": 3}', '{"weight": ["x"]}', '{"weight": null}'])
def test_an_index_of_no_names_is_refused(weights: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(f'{{"weight_map": {weights}}}')
    with pytest.raises(ConfigError, match=INDEX):
        taken(tmp_path)


@pytest.mark.parametrize("file", ["", ".", "..", "/", "../../etc/passwd", "gone.safetensors", "a\\u0000b", "\\ud800"])
def test_an_index_of_files_that_are_not_there_is_refused_before_a_value_is_made(file: str, tmp_path: Path) -> None:
    write_index(tmp_path, file)
    with pytest.raises(ConfigError, match=INDEX):
        taken(tmp_path)


def test_links_to_files_are_files(directory: Path) -> None:
    """As caches of downloads keep weights, and people their settings."""
    blobs = directory / "blobs"
    blobs.mkdir()
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, blobs / "1f")
    (blobs / "2e").write_text('{"weight_map": {"weight": "1f.safetensors", "bias": "1f.safetensors"}}')
    (directory / "1f.safetensors").symlink_to(blobs / "1f")
    (directory / INDEX).symlink_to(blobs / "2e")
    taken(directory)
    remember(directory, Settings("threads"))
    cache_file().rename(blobs / "3d")
    cache_file().symlink_to(blobs / "3d")
    assert recall(directory) is not None


@pytest.mark.parametrize("value", [None, [], {}, "x", [[1]], {"type": 3, "params": []}])
@pytest.mark.parametrize(
    "option",
    ["optimizer", "gradient_clipping", "gradient_accumulation_steps", "zero_optimization.offload_param.nvme_path"],
)
def test_options_of_another_kind_are_named(option: str, value: Any, tmp_path: Path) -> None:
    config: Any = value
    for name in reversed(option.split(".")):
        config = {name: config}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with contextlib.suppress(ConfigError):  # or it says what becomes of it
        convert(tmp_path / "ds.json")
