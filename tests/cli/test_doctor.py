import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from offload import native
from offload.cli import machine
from offload.cli.main import app
from tests.support.command import printed

KEYS = [
    "python", "offload", "torch", "devices", "pinning", "cpu", "cpu_flags", "usable_cpus", "torch_threads",
    "kernel", "kernel_threads", "kernels_available", "kernel_library", "kernel_fallback",
    "memory_total_bytes", "memory_free_bytes", "cgroup_room_bytes", "memlock_limit_bytes",
    "transparent_huge_pages", "open_files_limit", "io_engine", "io_uring", "path", "file_system", "free_bytes",
    "o_direct", "hints",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """py-cpuinfo takes a second; one test asks it."""
    monkeypatch.setattr(native, "cpu_model", lambda: ("A CPU", ("avx2", "avx512_bf16", "ht")))


def doctor(*options: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *options])


def findings(*options: str) -> dict[str, Any]:
    return printed(doctor("--json", *options))


def test_json_keys_are_stable(tmp_path: Path) -> None:
    values = findings("--path", str(tmp_path))
    assert list(values) == KEYS
    assert values["cpu_flags"] == ["avx2", "avx512_bf16"]
    assert values["kernel"] in values["kernels_available"]
    assert values["path"] == str(tmp_path)
    assert 0 < values["memory_free_bytes"] <= values["memory_total_bytes"]
    assert values["io_engine"] in ("uring", "threads")
    assert list(tmp_path.iterdir()) == []  # what was tried there is gone


def test_table_has_a_line_for_every_finding(tmp_path: Path) -> None:
    result = doctor("--path", str(tmp_path))
    assert result.exit_code == 0, result.output
    for item in ("torch", "A CPU", "Adam kernel", "O_DIRECT", "io_uring", "open-file limit"):
        assert item in result.stdout


def test_the_verdict_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "huge_pages", lambda: "madvise")
    monkeypatch.setattr(machine, "takes_direct_io", lambda path: True)
    monkeypatch.setattr(machine, "file_system", lambda path: "ext4")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert doctor().stdout.splitlines()[-1] == "Nothing slows this machine."
    monkeypatch.setattr(machine, "huge_pages", lambda: "never")
    monkeypatch.setattr(machine, "file_system", lambda path: "tmpfs")
    *_, verdict, pages, files = doctor().stdout.splitlines()
    assert verdict == "What slows this machine:"
    assert pages.startswith("- transparent huge pages: never: I/O takes twice the CPU time: set ")
    assert files.startswith("- file system: tmpfs: it is RAM")


def test_fallback_kernels_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_variants", lambda: ("torch",))
    monkeypatch.setattr(native, "fallback_reason", lambda: "no C compiler")
    monkeypatch.setattr(native, "library_path", lambda: None)
    values = findings()
    assert (values["kernel"], values["kernel_library"]) == ("torch", None)
    assert values["kernel_fallback"] == "no C compiler"
    assert "slower: no C compiler" in values["hints"]["kernel"]
    assert "no C compiler" in doctor().stdout


def test_forced_slower_kernel_is_hinted_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_variants", lambda: ("avx2", "torch"))
    monkeypatch.setattr(native, "fallback_reason", lambda: None)
    monkeypatch.setenv("OFFLOAD_KERNELS", "torch")
    assert findings()["hints"]["kernel"] == "avx2 is the fastest here: unset OFFLOAD_KERNELS"


def test_hints_are_only_for_what_costs_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "huge_pages", lambda: "madvise")
    monkeypatch.setattr(machine, "takes_direct_io", lambda path: True)
    monkeypatch.setattr(machine, "file_system", lambda path: "ext4")
    hints = findings()["hints"]
    assert not hints.keys() & {"transparent_huge_pages", "o_direct", "file_system", "cpu_flags"}
    monkeypatch.setattr(machine, "huge_pages", lambda: "never")
    monkeypatch.setattr(machine, "takes_direct_io", lambda path: False)
    monkeypatch.setattr(machine, "file_system", lambda path: "nfs4")
    monkeypatch.setattr(native, "cpu_model", lambda: ("An old CPU", ("avx2",)))
    hints = findings()["hints"]
    assert hints.keys() >= {"transparent_huge_pages", "o_direct", "file_system", "cpu_flags"}


@pytest.mark.parametrize("path", ["nowhere", __file__])
def test_path_that_is_no_directory_is_refused(path: str) -> None:
    result = doctor("--path", path)
    assert result.exit_code == 2
    assert result.stderr == f"ConfigError: --path {path} is not a directory: give one that exists\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_path_that_cannot_be_written_to_has_no_answer_for_direct_io() -> None:
    assert machine.takes_direct_io(Path("/proc")) is None
    assert machine.file_system(Path("/proc")) == "proc"
    assert machine.file_system(Path("/proc/self/fd")) == "proc"


def test_file_system_is_that_of_the_deepest_mount_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (
        "22 1 8:1 / / rw - ext4 /dev/a rw\n"
        "23 22 8:2 / /data\\040disk rw,x shared:1 - xfs /dev/b rw\n"
        "24 22 8:3 / /data rw - btrfs /dev/c rw\n"
        "25 22 8:4 / /dätä rw - f2fs /dev/d rw"
    )
    monkeypatch.setattr(machine, "read_text", lambda file: mounts)
    paths = ("/data disk/runs", "/data/runs", "/database", "/", "/dätä/runs")
    assert [machine.file_system(Path(path)) for path in paths] == ["xfs", "btrfs", "ext4", "ext4", "f2fs"]


def test_names_in_proc_have_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(b"22 1 8:1 / /d\xe4ta rw - ext4 /dev/a rw\n")
    assert machine.read_text(tmp_path / "mountinfo") == "22 1 8:1 / /d\udce4ta rw - ext4 /dev/a rw"


@pytest.mark.parametrize(
    ("content", "word"), [("always [madvise] never\n", "madvise"), ("[never]", "never"), (None, None)]
)
def test_huge_pages_are_the_word_in_brackets(
    monkeypatch: pytest.MonkeyPatch, content: str | None, word: str | None
) -> None:
    monkeypatch.setattr(machine, "read_text", lambda file: content)
    assert machine.huge_pages() == word


@pytest.mark.parametrize(("content", "answer"), [("0", "yes"), ("1", "restricted"), ("2", "no"), (None, "unknown")])
def test_io_uring_is_read_from_its_switch(monkeypatch: pytest.MonkeyPatch, content: str | None, answer: str) -> None:
    monkeypatch.setattr(machine, "read_text", lambda file: content)
    assert machine.io_uring() == answer


def test_no_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, 5))
    assert machine.soft_limit(resource.RLIMIT_NOFILE) is None
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    assert machine.soft_limit(resource.RLIMIT_NOFILE) == 1024
