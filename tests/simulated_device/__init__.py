"""A simulated accelerator: a device of torch's, "simulated", that runs on the CPU and shows missing waits.

Each stream is a thread that does what it was given when somebody waits for it, or after a random delay. Device memory
cannot be read by the host. Freed memory is full of NaN, in the order of its stream. Vector clocks find two accesses of
different streams that nobody ordered, whatever the delays were.

What it cannot show: kernels read their inputs when they are called, after all that their stream has queued. A host
that runs ahead of kernels is therefore seen by the vector clocks only.

A process has the device from `load()` on, which has to come before its first backward: autograd then counts the
devices. So tests of it run in processes of their own (make test-device), where OFFLOAD_TEST_DEVICE says so.

It knows torch, and nothing of the library that is tested with it. docs/simulated-device.md is the contract.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAME = "simulated"
HERE = Path(__file__).parent
SOURCES = ("device.cpp", "kernels.cpp", "autocast.cpp")
COUNTERS = (
    "kernels",
    "to_device",
    "to_host",
    "on_device",
    "to_device_bytes",
    "to_host_bytes",
    "pageable_non_blocking",
    "blocking_copies",
    "device_waits",
    "stream_waits",
    "event_waits",
    "event_queries",
    "allocations",
    "segment_allocations",
    "segment_frees",
    "pinned_bytes",
)
"""In the order of device.h."""

_ENVIRONMENT = "OFFLOAD_TEST_DEVICE"


def is_wanted() -> bool:
    """Whether this process is to run its tests on the simulated accelerator, and can."""
    return os.environ.get(_ENVIRONMENT) == NAME and compiler() is not None


def compiler() -> str | None:
    """The C++ compiler; None if there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """The library, compiled at its first use and kept in a cache. Raises: RuntimeError with what the compiler says."""
    return _compiled([HERE / name for name in SOURCES], [], [])


def build_beside(source: Path, flags: Sequence[str], includes: Sequence[Path]) -> Path:
    """A library of a file in C++ that does something on the device, by what `device.h` has; kept in the cache, too.

    Args:
        source: the file.
        flags: for the compiler.
        includes: files that it includes beside `device.h`; it finds them by their names.

    Raises: RuntimeError with what the compiler says.
    """
    return _compiled([source], [*flags, str(build())], includes)


def _compiled(sources: Sequence[Path], flags: Sequence[str], includes: Sequence[Path]) -> Path:
    """Args: flags: of compiler and linker; includes: files that are included beside `device.h` and torch's."""
    found = compiler()
    if found is None:
        raise RuntimeError("there is no C++ compiler")
    torch_root = Path(torch.__file__).resolve().parent
    compiling = [
        "-std=c++20",
        "-O1",
        "-g0",
        "-fPIC",
        "-w",
        "-ffp-contract=off",
        "-DAT_PER_OPERATOR_HEADERS",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_root / 'include'}",
        *(flag for flag in flags if flag.startswith("-")),
    ]
    own = [
        f"-I{folder}" for folder in {HERE, *(file.parent for file in includes)}
    ]  # wherever they are: not in the digest
    linking = [flag for flag in flags if not flag.startswith("-")]
    linking += [f"-L{torch_root / 'lib'}", f"-Wl,-rpath,{torch_root / 'lib'}", "-ltorch_cpu", "-lc10", "-pthread"]
    digest = hashlib.sha256(repr((torch.__version__, sys.platform, found, compiling, linking)).encode())
    for file in (*sources, HERE / "device.h", *includes):
        digest.update(file.read_bytes())
    cache = Path(os.environ.get("OFFLOAD_TEST_CACHE", tempfile.gettempdir())) / f"offload-accelerator-{os.getuid()}"
    library = cache / f"{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:

        def compile_one(source: Path) -> str:
            made = f"{scratch}/{source.name}.o"
            _run([found, *compiling, *own, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_one, sources))
        made = f"{scratch}/library.so"
        _run([found, "-shared", *objects, "-o", made, *linking])
        os.replace(made, library)  # two processes may build at once
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.simulated_random_state.restype = ctypes.c_uint64
    library.simulated_contexts.restype = ctypes.c_uint64
    library.simulated_host_s.restype = ctypes.c_double
    library.simulated_host_until.argtypes = library.simulated_host_spends.argtypes = [ctypes.c_double]
    library.simulated_virtual_time.argtypes = [ctypes.c_double] * 6
    library.simulated_slow_link.argtypes = [ctypes.c_double]
    return library


@functools.cache
def load() -> None:
    """Makes the device known to torch. Before the first backward of the process."""
    torch.utils.rename_privateuse1_backend(NAME)
    library = _library()
    torch._register_device_module(NAME, _module(library))
    torch.utils.generate_methods_for_privateuse1_backend()


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """What `torch.get_device_module("simulated")` gives: the functions that torch and this library ask for."""
    module: Any = types.ModuleType(f"torch.{NAME}")

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return library.simulated_device() if found is None else found

    def get_rng_state(device: Any = None) -> Tensor:
        state = torch.empty(library.simulated_random_state(index(device), None), dtype=torch.uint8)
        library.simulated_random_state(index(device), ctypes.c_void_p(state.data_ptr()))
        return state

    def set_rng_state(state: Tensor, device: Any = None) -> None:
        library.simulated_set_random_state(index(device), ctypes.c_void_p(state.data_ptr()))

    def manual_seed_all(seed: int) -> None:
        library.simulated_seed(ctypes.c_uint64(seed % 2**64))

    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._lazy_init = lambda: (
        None
    )  # before torch 2.13 a device without one is never initialized, and never waited for
    module.device_count = library.simulated_devices
    module.current_device = library.simulated_device
    module.set_device = lambda device: torch.accelerator.set_device_index(index(device))
    module.device = torch.accelerator.device_index
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index(device))
    module.get_device_name = lambda device=None: f"simulated accelerator {index(device)}"
    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.get_rng_state_all = lambda: [get_rng_state(one) for one in range(library.simulated_devices())]
    module.set_rng_state_all = lambda states: [set_rng_state(state, one) for one, state in enumerate(states)]
    module.manual_seed_all = module.manual_seed = manual_seed_all
    module._is_in_bad_fork = lambda: bool(library.simulated_is_child())
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]

    def register(address: int, nbytes: int, flags: int) -> int:
        require_parent()
        return library.simulated_register(ctypes.c_void_p(address), ctypes.c_uint64(nbytes))

    def unregister(address: int) -> int:
        require_parent()
        return library.simulated_unregister(ctypes.c_void_p(address))

    def require_parent() -> None:
        if library.simulated_is_child():
            raise RuntimeError("the child of a fork called the driver")

    module.cudart = lambda: types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    return module  # type: ignore[no-any-return]


# What tests ask of it.


def counters() -> dict[str, int]:
    """What has happened since the process began."""
    found = (ctypes.c_uint64 * len(COUNTERS))()
    _library().simulated_counters(found)
    return dict(zip(COUNTERS, found, strict=True))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Fills the dict with what happened in the block."""
    found: dict[str, int] = {}
    before = counters()
    yield found
    found |= {name: value - before[name] for name, value in counters().items()}


def races() -> list[str]:
    """Accesses without an order since the last call."""
    text = ctypes.create_string_buffer(1 << 16)
    _library().simulated_races(text, len(text))
    return text.value.decode().splitlines()


def contexts() -> set[int]:
    """The devices that something was done on. On a real one that takes half a GiB of its memory."""
    found = _library().simulated_contexts()
    return {device for device in range(_library().simulated_devices()) if found >> device & 1}


@contextmanager
def failing() -> Iterator[None]:
    """In the block every call raises, as after an assertion in a kernel."""
    _library().simulated_fail(1)
    try:
        yield
    finally:
        _library().simulated_fail(0)


class Span(NamedTuple):
    """A copy, or a matrix product, in virtual time, or a wait of the host: its stream is -1 - the waiting clock."""

    stream: int
    start_s: float
    end_s: float
    name: str


class HostCosts(NamedTuple):
    """What a thread of the host spends in virtual time. Threads do not take turns, as those of Python do.

    launch_s: on each operation that it gives to a device; event_s: on each event that it records, asks for, or makes a
    stream wait for; wake_s: until it goes on after a wait; hook_s: in each hook of a gradient that was accumulated,
    beside what the hook launches.
    """

    launch_s: float = 0.0
    event_s: float = 0.0
    wake_s: float = 0.0
    hook_s: float = 0.0


NO_COSTS = HostCosts()


@contextmanager
def virtual_time(
    bytes_per_s: float, product_s: float, *, exchanged_bytes_per_s: float | None = None, host: HostCosts = NO_COSTS
) -> Iterator[None]:
    """In the block copies, matrix products and the host take so long in virtual time, from 0 on, and the rest nothing.

    An event counts as done when the clock of the thread that asks is past it. Hooks of gradients count if they are
    registered in the block.

    Args:
        bytes_per_s: of copies, each way. product_s: of a matrix product. exchanged_bytes_per_s: of the two copies that
            a collective consists of; None: as others. host: what the host spends.
    """
    register = Tensor.register_post_accumulate_grad_hook

    def register_clocked(self: Tensor, hook: Callable[[Tensor], None]) -> Any:
        def clocked(leaf: Tensor) -> None:
            host_spends(host.hook_s)
            hook(leaf)

        return register(self, clocked)

    _library().simulated_virtual_time(
        bytes_per_s, exchanged_bytes_per_s or bytes_per_s, product_s, host.launch_s, host.event_s, host.wake_s
    )
    Tensor.register_post_accumulate_grad_hook = register_clocked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_post_accumulate_grad_hook = register  # type: ignore[method-assign]
        _library().simulated_virtual_time(0, 0, 0, 0, 0, 0)


def use_clock(clock: int, *, is_host: bool = True) -> None:
    """This thread is one of those that have this clock, 0 to 7; at first all have clock 0.

    Args: is_host: False: it stands for hardware that does its part of a collective. The host spends nothing on it, and
    does not know what it has waited for.
    """
    _library().simulated_use_clock(clock, is_host)


def host_s(clock: int = 0) -> float:
    """What a clock of the host says."""
    return float(_library().simulated_host_s(clock))


def host_spends(s: float) -> None:
    """This thread does something that takes `s`."""
    _library().simulated_host_spends(s)


def host_launches() -> None:
    """This thread launches something that the device does not know as an operation: a collective."""
    _library().simulated_host_launches()


def host_until(s: float) -> None:
    """This thread waits for something that ends at `s`, unless it is later already."""
    _library().simulated_host_until(s)


def spans() -> list[Span]:
    """What took virtual time."""
    text = ctypes.create_string_buffer(1 << 22)
    _library().simulated_spans(text, len(text))
    lines = (line.split(" ", 3) for line in text.value.decode().splitlines())
    return [Span(int(stream), float(start), float(end), name) for stream, start, end, name in lines]


def set_delays(seed: int, longest_us: int = 20000) -> None:
    """Args: longest_us: how long a stream rests before a task that nobody waits for."""
    _library().simulated_delays(ctypes.c_uint64(seed), ctypes.c_uint64(longest_us))


@contextmanager
def slow_link(bytes_per_s: float) -> Iterator[None]:
    """In the block copies take so long, each way, on the machine's clock. A stream sleeps meanwhile."""
    _library().simulated_slow_link(bytes_per_s)
    try:
        yield
    finally:
        _library().simulated_slow_link(0)


@contextmanager
def memory_limit(nbytes: int, device: int = 0) -> Iterator[None]:
    """The device has so much memory in the block."""
    _, before = torch.accelerator.get_memory_info(device)
    _library().simulated_limit(device, ctypes.c_uint64(nbytes))
    try:
        yield
    finally:
        _library().simulated_limit(device, ctypes.c_uint64(before))


def fail_allocation(count: int, device: int = 0) -> None:
    """The allocation that is `count` calls from now runs out of memory; 0: none."""
    _library().simulated_fail_allocation(device, count)


def refuse_pinning(times: int) -> None:
    """The next `times` attempts to page-lock memory fail; 0: none."""
    _library().simulated_refuse_pinning(times)


# What torch's builds for CUDA have, and those for CPUs do not.


def can_allow_access() -> bool:
    """Whether `allow_access` works with this torch."""
    return bool(_library().simulated_can_allow_access())


def forbid_access(storage: int, message: str) -> None:
    """Makes reading a storage of whatever device raise. Args: storage: its `_cdata`."""
    _library().simulated_forbid_access(ctypes.c_void_p(storage), message.encode())


def allow_access(storage: int) -> None:
    """Undoes `forbid_access`. Args: storage: its `_cdata`."""
    _library().simulated_allow_access(ctypes.c_void_p(storage))
