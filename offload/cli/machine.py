"""What the machine says about itself in /proc, /sys and limits. Most functions return None where it does not say."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from offload.io.engine import open_file


def package_version() -> str:
    """The version of this library, as it was installed."""
    try:
        return version("offload")
    except PackageNotFoundError:  # run from its folder
        return "not installed"


def read_text(file: str | Path) -> str | None:
    try:
        return os.fsdecode(Path(file).read_bytes()).strip()  # names in it have any bytes
    except OSError:
        return None


def soft_limit(kind: int) -> int | None:
    """This process's soft limit of a resource; None: it is unlimited.

    Args:
        kind: one of the RLIMIT_ constants of the module `resource`.
    """
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def huge_pages() -> str | None:
    """The kernel's setting of transparent huge pages: "always", "madvise" or "never"."""
    words = (read_text("/sys/kernel/mm/transparent_hugepage/enabled") or "").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def io_uring() -> str:
    """Whether this kernel lets processes use io_uring: "yes", "restricted", "no" or "unknown"."""
    setting = read_text("/proc/sys/kernel/io_uring_disabled")
    return {"0": "yes", "1": "restricted", "2": "no"}.get(setting or "", "unknown")


def file_system(path: Path) -> str | None:
    """The type of the file system that holds `path`, such as "ext4"."""
    found: tuple[int, str] = (-1, "")
    real = path.resolve()
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        # Spaces in a mount point are written in octal. Later lines hide earlier ones of the same point.
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4]))
        if real.is_relative_to(point) and len(point.parts) >= found[0]:
            found = (len(point.parts), right.split()[0])
    return found[1] or None


def takes_direct_io(directory: Path) -> bool | None:
    """Whether swap files in `directory` would be opened with O_DIRECT; None: no file can be made there."""
    file = directory / f".offload-doctor-{secrets.token_hex(8)}"
    try:
        opened = open_file(str(file))
    except OSError:
        return None
    try:
        return opened.direct
    finally:
        opened.close()
        with contextlib.suppress(OSError):
            os.unlink(file)


def fast_dtype() -> str:
    """The dtype that is fastest to compute in on this machine, as --dtype takes it.

    It is "fp32" where bf16 is some fifty times slower: without an accelerator, AVX-512 or SVE, torch multiplies bf16
    matrices one element after the other.
    """
    import torch

    from offload.devices.copies import accelerator

    capability = torch.backends.cpu.get_cpu_capability()
    is_fast = accelerator() is not None or "AVX512" in capability or "SVE" in capability
    return "bf16" if is_fast else "fp32"
