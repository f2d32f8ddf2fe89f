"""What is refused before training: by name, with nothing allocated, written, locked or changed."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

import pytest
import torch
from torch import Tensor, nn

import offload.build
from offload import (
    BudgetError,
    ConfigError,
    GradientMovedError,
    OffloadError,
    OffloadZero,
    PathError,
    PathInUseError,
    ResumeError,
    TierIOError,
    Tuning,
)
from offload.io.files import Files
from offload.native.library import open_library
from offload.planner import least_cpu_memory, placement
from offload.storage.arena import Arena
from offload.storage.directories import COMMIT_NAME, older_swap_name
from tests.faults.conftest import SMALL, Make, Tiny, assert_same, bits, one_step
from tests.support.before import Before
from tests.support.disks import FailingFiles, FreeFiles, on_disk
from tests.support.faulty_engine import FaultyEngine
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.processes import Forked, arena_bytes, open_files
from tests.support.run_files import kinds_in, swap_in
from tests.support.scripts import run_code

AdamW = torch.optim.AdamW


@pytest.fixture
def unchanged(model: Tiny, tmp_path: Path) -> Iterator[None]:
    """After a refusal everything is as it was: model, optimizer, files, descriptors, threads, memory."""
    gc.collect()  # what another test has forgotten
    before = bits(model), open_files(), set(threading.enumerate()), arena_bytes(), sorted(tmp_path.rglob("*"))
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    pointers = [param.data_ptr() for param in model.parameters()]
    yield
    assert_same(bits(model), before[0])
    after = open_files(), set(threading.enumerate()), arena_bytes(), sorted(tmp_path.rglob("*"))
    assert after == before[1:]
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert [param.data_ptr() for param in model.parameters()] == pointers
    assert all(not param._backward_hooks for param in model.parameters())


@pytest.mark.usefixtures("unchanged")
def test_nvme_without_a_path_is_refused(model: Tiny) -> None:
    with pytest.raises(ConfigError, match="needs path="):
        OffloadZero(model, tier="nvme")


@pytest.fixture(params=["file", "symlink", "no parent", "read-only", "read-only parent", "proc"])
def bad_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    place = tmp_path / "bad"
    if request.param == "file":
        place.write_text("mine")
        yield place, errno.ENOTDIR
    elif request.param == "symlink":
        (tmp_path / "real").mkdir()
        place.symlink_to(tmp_path / "real")
        yield place, errno.ELOOP
    elif request.param == "no parent":
        yield place / "deeper", errno.ENOENT
    elif request.param == "proc":
        yield Path("/proc/offload-run"), errno.ENOENT
    else:
        place.mkdir()
        mounted = (
            not os.geteuid()
            and not subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)], check=False, capture_output=True
            ).returncode
        )
        if not mounted:
            place.chmod(0o500)
        yield place if request.param == "read-only" else place / "run", errno.EACCES
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_path_that_cannot_be_it_is_refused(
    bad_path: tuple[Path, int], model: Tiny, unchanged: None, make: Make
) -> None:
    with pytest.raises(PathError) as caught:
        make(model, path=bad_path[0])
    assert (caught.value.errno, caught.value.filename) == (bad_path[1], str(bad_path[0]))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_too_little_ram_is_refused_and_the_advice_works(
    tier: str, model: Tiny, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"tuning": SMALL} | ({"path": tmp_path / "run"} if tier == "nvme" else {})
    with pytest.raises(BudgetError) as caught:
        OffloadZero(model, cpu_memory="1KiB", **options)
    assert (caught.value.available, caught.value.option) == (1024, "cpu_memory")
    advised = re.search(r'give cpu_memory="([^"]+)" or more', str(caught.value))
    assert advised is not None
    with pytest.raises(BudgetError):
        OffloadZero(model, cpu_memory=caught.value.needed - 1, **options)
    assert not (tmp_path / "run").exists()
    assert model.first.weight.dtype is torch.float32
    with OffloadZero(model, cpu_memory=caught.value.needed, **options) as optimizer:
        one_step(model, optimizer)
        assert optimizer.stats()["peak_cpu_bytes"] == caught.value.needed
        assert optimizer._parts.run.memory.ram.size == caught.value.needed
    # As it is to be typed: in a unit, rounded up.
    elsewhere = {name: tmp_path / "other" if name == "path" else value for name, value in options.items()}
    with OffloadZero(other := Tiny(), cpu_memory=advised[1], **elsewhere) as optimizer:
        one_step(other, optimizer)


@pytest.mark.parametrize("path", [False, True], ids=["without commits", "with commits"])
@pytest.mark.parametrize("is_apart", [False, True], ids=["on the CPU", "on a device of its own"])
def test_too_little_device_memory_for_the_states_is_refused_and_the_advice_works(
    is_apart: bool, path: bool, model: Tiny, tmp_path: Path, copied_by: CopiedBy
) -> None:
    if is_apart:
        copied_by(lambda: LateCopier(0))
    options: dict[str, Any] = {"tier": "device", "tuning": SMALL} | ({"path": tmp_path / "run"} if path else {})
    with pytest.raises(BudgetError, match='choose tier="cpu"') as caught:
        OffloadZero(model, device_memory="1KiB", **options)
    assert (caught.value.available, caught.value.option) == (1024, "device_memory")
    with pytest.raises(BudgetError):
        OffloadZero(model, device_memory=caught.value.needed - 1, **options)
    if path:
        with pytest.raises(BudgetError, match="smaller Tuning") as without_buffers:
            OffloadZero(model, cpu_memory=1, **options)
        options["cpu_memory"] = without_buffers.value.needed
    assert not (tmp_path / "run").exists()
    assert model.first.weight.dtype is torch.float32
    with OffloadZero(model, device_memory=caught.value.needed, **options) as optimizer:
        one_step(model, optimizer)
        stats = optimizer.stats()
        assert stats["peak_device_bytes"] == stats["device_budget_bytes"] == caught.value.needed
        assert stats["peak_cpu_bytes"] == (options["cpu_memory"] if path else 0)


@pytest.mark.usefixtures("unchanged")
def test_a_budget_beyond_what_the_machine_has_free_is_refused(
    model: Tiny, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "free_memory", lambda: 50_000)
    for options in ({"path": None}, {}):
        with pytest.raises(BudgetError) as caught:
            make(model, cpu_memory="4GiB", **options)
        assert caught.value.available == 50_000
        assert caught.value.needed > 50_000
        assert caught.value.option == "cpu_memory"


@pytest.mark.usefixtures("unchanged")
def test_memory_that_the_machine_refuses_leaves_nothing(
    model: Tiny, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.build, "Arena", lambda size, copier, **options: Arena(1 << 60, copier))
    with pytest.raises(BudgetError) as caught:
        make(model)
    assert caught.value.needed == 1 << 60


@pytest.mark.usefixtures("unchanged")
def test_too_little_disk_is_refused(model: Tiny, make: Make) -> None:
    with on_disk(FreeFiles(5 * 4096)), pytest.raises(BudgetError) as caught:
        make(model)
    assert caught.value.available < caught.value.needed
    assert caught.value.option == "path"


@pytest.mark.usefixtures("unchanged")
def test_where_one_slot_a_chunk_would_fit_that_is_named(model: Tiny, make: Make) -> None:
    slots = 5 * (1 + 3)  # Tiny's chunks: a header and three arrays of a page each
    for free, option in ((slots, "path"), (1 + slots, "commit_every"), (2 * slots, "commit_every")):
        few = FreeFiles((free - 1) * 4096)  # the superblock has its page already
        with on_disk(few), pytest.raises(BudgetError, match=r"or choose another path") as caught:
            make(model)
        room = 2 * (2 + 1)  # two spares of a manifest and a record
        assert caught.value.needed == 4096 * (1 + 2 * slots + room)
        assert caught.value.option == option
        assert ("commit_every=None" in str(caught.value)) == (option == "commit_every")


def test_a_full_disk_shows_before_training(model: Tiny, make: Make, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a small tmpfs")
    try:
        with pytest.raises(BudgetError) as caught:
            make(model, path=place / "run")
        assert caught.value.available <= 64 * 1024
        assert list(place.iterdir()) == []
        assert model.first.weight.dtype is torch.float32
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_locked_path_is_refused_until_its_run_ends(model: Tiny, make: Make, path: Path) -> None:
    first = make(model)
    one_step(model, first)
    before = bits(model, first)
    other = Tiny()
    with pytest.raises(PathInUseError) as caught:
        make(other)
    assert caught.value.filename == str(path)
    assert other.first.weight.dtype is torch.float32
    assert_same(bits(model, first), before)
    first.close()
    one_step(other, make(other))


@pytest.mark.parametrize("has_commit", [False, True])
@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_a_live_run_is_what_is_said_whatever_it_has_committed(
    has_commit: bool, resume: bool | str, model: Tiny, make: Make, path: Path
) -> None:
    """And not to resume it, or to remove it."""
    first = make(model)
    if has_commit:
        one_step(model, first)
        first.commit()
    with pytest.raises(PathInUseError, match="a live run holds this path"):
        make(Tiny(), resume=resume)
    first.close()


RUN = """
import os, sys, time, torch
from torch import nn
from offload import OffloadZero
optimizer = OffloadZero(nn.Linear(8, 8), path=sys.argv[1])
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_child_that_outlives_a_killed_parent_does_not_hold_the_path(model: Tiny, make: Make, path: Path) -> None:
    with Forked(RUN, str(path)) as parent:
        child = int(parent.stdout.readline())
        try:
            with pytest.raises(PathInUseError):
                make(model)
            parent.kill()
            parent.wait()
            os.kill(child, 0)
            one_step(model, make(model))
        finally:
            os.kill(child, 9)


def test_files_of_others_at_the_path_are_left_alone(model: Tiny, make: Make, path: Path) -> None:
    path.mkdir()
    (path / "offload-rank7.swap").write_bytes(b"another rank's")
    (path / "notes").mkdir()
    with make(model) as optimizer:
        one_step(model, optimizer)
    assert (path / "offload-rank7.swap").read_bytes() == b"another rank's"
    assert kinds_in(path) == {"notes", "swap", "tag"}


def test_a_foreign_file_in_the_swap_files_place_is_refused(
    model: Tiny, make: Make, path: Path, request: pytest.FixtureRequest
) -> None:
    path.mkdir()
    (path / older_swap_name(0)).write_bytes(b"my thesis" * 5000)
    request.getfixturevalue("unchanged")
    with pytest.raises(PathError, match="choose another path"):
        make(model)
    assert (path / older_swap_name(0)).read_bytes() == b"my thesis" * 5000
    assert [file.name for file in path.iterdir()] == [older_swap_name(0)]


def test_a_committed_run_at_the_path_is_refused(
    model: Tiny, make: Make, path: Path, request: pytest.FixtureRequest
) -> None:
    make(Tiny()).close()
    (path / COMMIT_NAME).write_text("{}")
    before = swap_in(path).read_bytes()
    request.getfixturevalue("unchanged")
    with pytest.raises(ResumeError, match="choose another path"):
        make(model)
    assert swap_in(path).read_bytes() == before


def test_a_run_that_committed_nothing_is_reused(make: Make) -> None:
    results = []
    for _ in range(2):
        model = Tiny()
        with make(model) as optimizer:
            one_step(model, optimizer)
            results.append(bits(model, optimizer))
    assert_same(*results)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a directory to another user")
def test_a_path_that_others_can_replace_warns_and_names_the_way_out(model: Tiny, make: Make, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 12345, -1)
    for mode, path in ((0o755, "mine"), (0o1777, "sticky")):
        shared.chmod(mode)
        make(Tiny(), path=shared / path).close()
    shared.chmod(0o777)
    with pytest.warns(UserWarning, match=rf"chmod \+t {shared}") as caught:
        make(Tiny(), path=[shared / "one", shared / "two"]).close()
    assert len(caught) == 1
    assert caught[0].filename == make.__code__.co_filename
    with pytest.warns(UserWarning, match=rf"chmod \+t {shared}"):
        make(model, path=shared)


# Limits of the process.


@pytest.mark.parametrize("engine", ["uring", "threads", "portable"])
def test_threads_that_the_system_refuses_leave_nothing(
    engine: str, model: Tiny, unchanged: None, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under RLIMIT_NPROC, which does not bind root."""
    tuning = Tuning(chunk="4KiB", threads=3, io_engine=engine)
    start, left = threading.Thread.start, [1000]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    try:
        make(Tiny(), path=tmp_path / "run", tuning=tuning).close()
    except ConfigError as error:
        pytest.skip(str(error))  # no io_uring here
    shutil.rmtree(tmp_path / "run")
    needed = 1000 - left[0]
    assert needed >= 3
    for number in range(needed):
        left[0] = number
        with pytest.raises(BudgetError, match="can't start new thread") as caught:
            make(model, path=tmp_path / "run", tuning=tuning)
        assert caught.value.option == "threads"


def test_threads_of_kernels_that_the_system_refuses_leave_nothing(
    model: Tiny, unchanged: None, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, _ = open_library()
    if library is None:
        pytest.skip("no library")
    monkeypatch.setattr(library, "offload_pool_open", lambda workers, handle: -errno.EAGAIN)
    with pytest.raises(BudgetError, match="the system refuses 2 threads for kernels") as caught:
        make(model, path=tmp_path / "run", tuning=Tuning(chunk="4KiB", threads=3))
    assert caught.value.option == "threads"


OF_ADDRESS_SPACE = """
import resource, sys, threading
import torch
from offload import BudgetError, OffloadZero
from tests.faults.conftest import Tiny
from tests.support.run_files import kinds_in, swap_in
model = Tiny()
torch.optim.AdamW(model.parameters())  # imports more modules
threading.stack_size(1 << 30)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 28), -1))
try:
    OffloadZero(model, path=sys.argv[1], cpu_memory="1MiB")
except BudgetError as error:
    print(error)
assert model.first.weight.dtype is torch.float32
"""


def test_too_little_address_space_for_threads_is_refused(tmp_path: Path) -> None:
    done = run_code(OF_ADDRESS_SPACE, str(tmp_path / "run"), limit_s=60)
    assert "ulimit -v" in done.stdout
    assert done.returncode == 0, done.stderr


def test_a_limit_of_file_sizes_is_told_as_one(model: Tiny, unchanged: None, make: Make, path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(BudgetError, match=r"ulimit -f.*several directories") as caught:
            make(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.available == 8192 < caught.value.needed
    assert not path.exists()


def test_too_few_descriptors_are_told_with_their_limit(model: Tiny, make: Make, path: Path) -> None:
    """Each start with one more than the one before, until there are enough."""
    before, files = resource.getrlimit(resource.RLIMIT_NOFILE), open_files()
    (free := os.open(os.devnull, os.O_RDONLY), os.close(free))
    errors: list[BudgetError] = []
    while True:
        limit = free + len(errors)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            make(model).close()
            break
        except BudgetError as error:
            errors.append(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        if path.exists():
            shutil.rmtree(path)  # looking into it takes a descriptor, too
    assert len(errors) > 5
    assert [error.available for error in errors] == [*range(free, limit)]
    assert open_files() == files
    assert all("ulimit -n" in str(error) for error in errors)


@pytest.mark.parametrize(
    "code", [pytest.param(errno.EIO, id="EIO"), pytest.param(errno.ENOENT, id="ENOENT", marks=pytest.mark.slow)]
)
def test_whatever_the_file_system_refuses_is_an_error_of_the_path(code: int, path: Path) -> None:
    """Each start gets one call further than the one before, until none fails."""
    errors: list[OffloadError] = []
    for nth in range(1, 1000):
        files = FailingFiles(nth, code)
        try:
            with on_disk(files):
                OffloadZero(Tiny(), path=path, cpu_memory="200KiB", tuning=SMALL).close()
        except OffloadError as error:
            errors.append(error)
        if not files.failed:
            break
        if path.exists():
            shutil.rmtree(path)  # what could not be removed
    assert len(errors) > 80
    assert all(isinstance(error, PathError | TierIOError) for error in errors)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_a_disk_with_free_bytes_that_gives_none_is_told_as_one(code: int, model: Tiny, make: Make) -> None:
    files = Files()

    def refuse(*_: object) -> Never:
        raise OSError(code, os.strerror(code))

    files.allocate = refuse  # type: ignore[method-assign]
    with on_disk(files), pytest.raises(BudgetError, match=rf"are free, but '{os.strerror(code)}' came: .*quota.*df -i"):
        make(model)


@pytest.mark.usefixtures("unchanged")
def test_inside_inference_mode_it_is_refused(model: Tiny, make: Make) -> None:
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"torch\.inference_mode"):
        make(model)


def test_a_relative_path_where_the_working_directory_is_gone_is_refused(
    model: Tiny, unchanged: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for options in ({"path": "run"}, {"path": tmp_path / "run", "resume": [Path("run")]}):
        with pytest.raises(PathError, match="working directory was removed"):
            OffloadZero(model, **options)  # type: ignore[call-overload]


# Models that cannot be trained.


def distributed() -> nn.Module:
    class DistributedDataParallel(nn.Module):
        """As torch's, which needs a process group: told by its name."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    return DistributedDataParallel(Tiny())


def with_device_map() -> nn.Module:
    model = Tiny()
    model.hf_device_map = {"first": 0, "last": "cpu"}  # type: ignore[assignment]
    return model


def quantised() -> nn.Module:
    model = Tiny()
    model.middle.weight = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    return model


def partly_double() -> nn.Module:
    model = Tiny()
    model.middle.double()
    return model


def with_gradient() -> nn.Module:
    model = Tiny()
    model.middle.weight.grad = torch.zeros_like(model.middle.weight)
    return model


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))


def frozen() -> nn.Module:
    return Tiny().requires_grad_(False)


def script_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))


def trace_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4)))


def lazy_buffer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False))


def with_param(param: Tensor) -> nn.Module:
    model = Tiny()
    model.odd = param if isinstance(param, nn.Parameter) else nn.Parameter(param)
    return model


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


def computed() -> nn.Module:
    model = Tiny()
    model._parameters["odd"] = model.first.weight * 2  # type: ignore[assignment]
    return model


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return Tiny()


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (distributed, "wrapped by DistributedDataParallel"),
        (lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "0 is wrapped by DataParallel"),
        (with_device_map, "device map"),
        (lambda: Tiny().double(), "first.weight has dtype torch.float64"),
        (partly_double, "middle.weight has dtype torch.float64"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "weight has dtype torch.complex64"),
        (with_gradient, "middle.weight already has a gradient"),
        (sparse, "0 makes sparse gradients"),
        (lazy, "1.weight has no shape yet"),
        (lazy_buffer, "1.running_mean has no shape yet"),
        (lambda: torch.jit.script(Tiny()), "the model is a TorchScript module"),
        (script_inside, "1 is a TorchScript module"),
        (trace_inside, "1 is a TorchScript module"),
        (lambda: with_param(torch.eye(3).to_sparse()), "odd is a tensor of layout torch.sparse_coo"),
        (lambda: with_param(torch.eye(3).to_sparse_csr()), "odd is a tensor of layout torch.sparse_csr"),
        (lambda: with_param(torch.eye(3).to_mkldnn()), "odd is a tensor of layout torch._mkldnn"),
        (lambda: with_param(jagged()), "odd is a nested tensor"),
        (computed, "odd is the result of an operation"),
        (made_for_inference, "first.weight is an inference tensor"),
        (frozen, "trains no parameter"),
        (nn.ReLU, "no parameters"),
        (lambda: "a model", "is not an nn.Module"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_model_that_cannot_be_trained_is_refused_by_name(
    build: Callable[[], nn.Module], named: str, make: Make, path: Path
) -> None:
    model = build()
    with pytest.raises(ConfigError) as caught:
        make(model, cpu_memory="1GiB")
    assert named in str(caught.value)
    assert not path.exists()


def qint8() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


def test_a_frozen_weight_of_integers_stays_as_it_is(make: Make) -> None:
    model = quantised()
    optimizer = make(model)
    assert torch.equal(model.middle.weight, torch.zeros(3, dtype=torch.uint8))
    optimizer.close()


@pytest.mark.parametrize(
    ("build", "options", "named"),
    [
        (qint8, {"param_tier": "cpu"}, "odd is a quantised tensor"),
        (qint8, {"device": "elsewhere"}, "odd is a quantised tensor"),
        (lambda: torch.eye(3).to_mkldnn(), {}, "odd is a mkldnn tensor"),
        (lambda: torch.eye(3).to_sparse(), {"param_tier": "cpu"}, r"odd is a Parameter \(torch.sparse_coo\)"),
        (inference, {"param_tier": "cpu"}, "odd is an inference tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_frozen_parameter_that_cannot_get_other_memory_is_refused_by_name(
    build: Callable[[], Tensor], options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_param(nn.Parameter(build(), requires_grad=False))
    before = Before(model)
    if options.pop("device", None) is not None:
        monkeypatch.setattr(offload.build, "device_for", lambda *_: torch.device("cpu", 1))
    with pytest.raises(ConfigError, match=named):
        OffloadZero(model, AdamW([p for p in model.parameters() if p.requires_grad]), **options)
    before.require_same()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_parameter_that_stays_where_it_is_does_no_harm() -> None:
    model = with_param(nn.Parameter(qint8(), requires_grad=False))
    with OffloadZero(model, AdamW([p for p in model.parameters() if p.requires_grad])) as optimizer:
        one_step(model, optimizer)
        assert model.odd.is_quantized


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_a_part_of_a_held_model_and_what_is_around_one_are_refused_by_name(param_tier: str) -> None:
    outer = nn.Sequential(Tiny(), nn.Linear(4, 4))
    held: Any = outer[0]
    tied = nn.Linear(96, 32)
    with OffloadZero(held, param_tier=param_tier) as optimizer:
        tied.weight = held.middle.weight
        with pytest.raises(ConfigError, match="0, in the model, is held by another OffloadZero"):
            OffloadZero(outer)
        with pytest.raises(ConfigError, match="weight is in a model that another OffloadZero holds"):
            OffloadZero(held.middle)
        with pytest.raises(ConfigError, match="weight is in a model that another OffloadZero holds"):
            OffloadZero(tied)
        one_step(held, optimizer)
    assert outer[1].weight.dtype is torch.float32
    assert tied.bias.dtype is torch.float32
    OffloadZero(outer).close()


def test_a_model_whose_parameters_were_left_released_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny()
    with monkeypatch.context() as patched:
        patched.setattr(offload.build.Plan, "room_at_end", lambda *_: 0)
        OffloadZero(model, param_tier="cpu").close()
    with pytest.raises(ConfigError, match=r"first\.weight has no values here since its optimizer"):
        OffloadZero(model)


def test_a_job_of_several_ranks_that_nobody_connected_is_refused(
    model: Tiny, unchanged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4"):
        OffloadZero(model)


def stepped(model: Tiny) -> torch.optim.Optimizer:
    optimizer = AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def taken_over(model: Tiny) -> torch.optim.Optimizer:
    optimizer = AdamW(model.parameters())
    OffloadZero(model, optimizer).close()
    return optimizer


class Counting(torch.optim.Adam):
    """Its rate falls with a count that it keeps on itself, where no commit finds it."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 1e-3 / self.count
        super().step()


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "optimizer is LBFGS, which cannot be offloaded: its step()"),
        (lambda m: Counting(m.parameters()), "optimizer is Counting, which cannot be offloaded"),
        (lambda m: list(m.parameters()), "optimizer is list"),
        (lambda m: AdamW(m.parameters(), differentiable=True), "optimizer is AdamW, which cannot be offloaded"),
        (lambda m: torch.optim.RMSprop([{"params": m.first.parameters()}, {"params": m.last.parameters(), "lr": "x"}]),
         "optimizer is RMSprop, which cannot be offloaded"),
        (lambda m: AdamW([*m.parameters(), nn.Parameter(torch.zeros(3, 5))]), "shape (3, 5) that is not in the model"),
        (stepped, "already stepped"),
        (taken_over, "taken over by another OffloadZero"),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_adopted_is_refused_by_name(
    build: Callable[[Tiny], torch.optim.Optimizer], named: str, make: Make, path: Path
) -> None:
    model = Tiny()
    optimizer = build(model)
    with pytest.raises(ConfigError) as caught:
        make(model, optimizer, cpu_memory="1GiB")
    assert named in str(caught.value)
    assert not path.exists()


@pytest.mark.usefixtures("unchanged")
def test_another_device_than_the_models_is_refused(model: Tiny) -> None:
    with pytest.raises(ConfigError, match="device=meta but the model is on cpu"):
        OffloadZero(model, device="meta")


@pytest.mark.usefixtures("unchanged")
def test_a_module_to_keep_that_is_not_in_the_model_is_refused(model: Tiny, make: Make) -> None:
    for keep in (nn.LayerNorm, nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match="not in the model"):
            make(model, keep_fp32=[keep], cpu_memory="1GiB")


# Half-way.


def test_a_disk_that_fails_while_masters_are_written_leaves_nothing_held(model: Tiny, make: Make) -> None:
    before = open_files(), arena_bytes()
    threads = {thread for thread in threading.enumerate() if thread.name != "faulty-disk"}
    given, before_it = AdamW(model.parameters()), Before(model)
    disk = FaultyEngine(delay_s=0.0005)
    disk.fail("write", errno.EIO, nth=3)
    with on_disk(engine=disk), pytest.raises(TierIOError) as caught:
        make(model, given)
    pairs = list(zip(model.parameters(), Tiny().parameters(), strict=True))
    lost = [now.isnan().all() for now, plain in pairs if not torch.equal(now, plain)]
    assert all(lost)
    assert bool(lost) == hasattr(caught.value, "__notes__")  # the disk had the only copy of some
    if not lost:
        before_it.require_same()
    del caught
    assert (open_files(), arena_bytes()) == before
    assert {thread for thread in threading.enumerate() if thread.name != "faulty-disk"} <= threads
    # Neither the path nor the optimizer is taken.
    fresh = Tiny()
    one_step(fresh, make(fresh))


@pytest.mark.parametrize(
    "culprit", ["_kernels_for", "LocalGradients", "Store", "FlatParameters", "MasterWeights", "Step"]
)
def test_whatever_fails_half_way_leaves_nothing(
    culprit: str, model: Tiny, unchanged: None, make: Make, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    path.mkdir()
    make_first = Tiny()
    make(make_first).close()
    monkeypatch.setattr(offload.build, culprit, broken)
    with pytest.raises(ZeroDivisionError):
        make(model)
    monkeypatch.undo()
    path.rmdir()


# Afterwards.


def test_close_leaves_neither_lock_nor_thread_nor_descriptor_nor_memory(model: Tiny, make: Make) -> None:
    before = open_files(), set(threading.enumerate()), arena_bytes()
    optimizer = make(model)
    one_step(model, optimizer)
    optimizer.close()
    optimizer.close()
    assert (open_files(), set(threading.enumerate()), arena_bytes()) == before
    assert not any(param._backward_hooks for param in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.float()(torch.zeros(1, 16)).sum().backward()
    del optimizer


def test_the_old_optimizers_step_raises(model: Tiny, make: Make) -> None:
    old = AdamW(model.parameters())
    optimizer = make(model, old)
    with pytest.raises(GradientMovedError, match="OffloadZero"):
        old.step()
    assert old.param_groups[0] is optimizer.param_groups[0]


def test_parameters_cannot_be_added_later(model: Tiny, make: Make) -> None:
    optimizer = make(model)
    with pytest.raises(ConfigError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_the_optimizer_cannot_be_copied(copying: Callable[[object], object], model: Tiny, make: Make) -> None:
    optimizer = make(model)
    with pytest.raises(ConfigError, match="cannot be copied"):
        copying(optimizer)
    one_step(model, optimizer)


def test_prefetch_and_least_memory_agree(model: Tiny, make: Make) -> None:
    least = least_cpu_memory(model, tuning=SMALL)
    with pytest.raises(BudgetError):
        make(model, cpu_memory=least - 1)
    optimizer = make(
        model, cpu_memory=least, tuning=Tuning(chunk="4KiB", prefetch_chunks=50, prefetch_units=50, threads=1)
    )
    assert optimizer.stats()["peak_cpu_bytes"] <= least
