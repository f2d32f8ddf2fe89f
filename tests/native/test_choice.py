"""Which variant runs, what is refused, and what the finished library's code may contain."""

from __future__ import annotations

import _ctypes
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from offload import native
from offload.errors import ConfigError
from offload.io import io_uring
from offload.native import library

from .bits import kernels

SCALARS = native.AdamScalars.at(step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OFFLOAD_KERNELS", raising=False)
    monkeypatch.setattr(library, "library_path", lambda: None)
    library.open_library.cache_clear()
    native._log_choice.cache_clear()
    yield
    library.open_library.cache_clear()
    native._log_choice.cache_clear()


def test_the_best_variant_is_taken_and_torch_is_always_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_KERNELS", raising=False)
    available = native.available_variants()
    assert available[-1] == "torch"
    assert list(available) == sorted(available, key=native.VARIANTS.index)
    assert native.load(1).variant == available[0]


def test_the_environment_forces_a_variant_and_the_argument_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_KERNELS", "torch")
    assert native.load(1).variant == "torch"
    other = native.available_variants()[0]
    assert native.load(1, other).variant == other
    monkeypatch.setenv("OFFLOAD_KERNELS", "sse9")
    with pytest.raises(ConfigError, match=r"OFFLOAD_KERNELS='sse9' is not a variant.*torch"):
        native.load(1)


def test_a_variant_that_cannot_run_here_is_refused() -> None:
    missing = next(name for name in native.VARIANTS if name not in native.available_variants())
    with pytest.raises(ConfigError, match=f"{missing}' cannot run on this machine: give one of .*torch"):
        native.load(1, missing)


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_a_wrong_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match="threads="):
        native.load(threads)


def test_without_the_library_torch_is_taken_and_it_is_said_once(
    no_library: None, caplog: pytest.LogCaptureFixture
) -> None:
    reason = native.fallback_reason()
    assert reason is not None
    assert "no C compiler" in reason
    assert native.available_variants() == ("torch",)
    with caplog.at_level(logging.WARNING, "offload"):
        assert native.load(1).variant == "torch"
        native.load(2)
    assert [record.message for record in caplog.records] == [
        f"the CPU kernels run through torch, slower and with the same bits: {reason}"
    ]


@pytest.fixture
def opened_anew() -> Iterator[None]:
    library.open_library.cache_clear()
    yield
    library.open_library.cache_clear()


@pytest.mark.skipif(native.library_path() is None, reason="no C library")
def test_the_environment_says_where_a_library_is_that_was_built_elsewhere(
    opened_anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "built.so"
    shutil.copy(str(LIBRARY), elsewhere)
    monkeypatch.setenv("OFFLOAD_KERNEL_LIBRARY", str(elsewhere))
    assert library.open_library()[0]._name == str(elsewhere)
    library.open_library.cache_clear()
    monkeypatch.setenv("OFFLOAD_KERNEL_LIBRARY", str(tmp_path / "none.so"))
    assert native.available_variants() == ("torch",)
    assert str(tmp_path / "none.so") in str(native.fallback_reason())


def test_a_broken_library_is_not_used(no_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "liboffload_kernels.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "library_path", lambda: broken)
    assert native.available_variants() == ("torch",)
    assert "install offload again" in str(native.fallback_reason())


@pytest.mark.parametrize("is_older", [True, False], ids=["without a number", "with another number"])
def test_the_library_of_another_version_is_refused(
    is_older: bool, no_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be called with the arguments of this one."""
    if is_older:
        monkeypatch.setattr(library, "library_path", lambda: Path(_ctypes.__file__))  # any library that loads
    else:
        monkeypatch.setattr(library, "library_path", lambda: LIBRARY)
        monkeypatch.setattr(library, "ABI", library.ABI + 1)
    for call in (native.load, io_uring._library.__wrapped__):
        with pytest.raises(ConfigError, match="install offload again"):
            call()


HALF, LOW = torch.ones(8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.int16)
CALLS: dict[str, Callable[[native.Kernels, torch.Tensor], None]] = {
    "master": lambda k, x: k.call(native.ADAM, x, torch.ones(8), torch.ones(8), torch.ones(8), None, scalars=SCALARS),
    "exp_avg": lambda k, x: k.call(native.ADAM, torch.ones(8), x, torch.ones(8), torch.ones(8), None, scalars=SCALARS),
    "exp_avg_sq": lambda k, x: k.call(
        native.ADAM, torch.ones(8), torch.ones(8), x, torch.ones(8), None, scalars=SCALARS
    ),
    "grad": lambda k, x: k.call(native.ADAM, torch.ones(8), torch.ones(8), torch.ones(8), x, None, scalars=SCALARS),
    "out": lambda k, x: k.call(native.ADAM, *[torch.ones(8) for _ in range(4)], x, scalars=SCALARS),
    "low": lambda k, x: k.call(
        native.ADAM_SPLIT, HALF, x, *[torch.ones(8) for _ in range(3)], HALF.clone(), scalars=SCALARS
    ),
    "param": lambda k, x: k.call(native.SPLIT, torch.ones(8), LOW, torch.ones(8), x),
    "master_out": lambda k, x: k.call(native.JOIN, HALF, LOW, torch.ones(8), x, torch.ones(8)),
    "exp_avg_sq_out": lambda k, x: k.call(native.JOIN, HALF, LOW, torch.ones(8), torch.ones(8), x),
    "x": lambda k, x: k.call(native.ACCUMULATE, torch.ones(8), x),
    "acc": lambda k, x: k.call(native.ACCUMULATE, x, torch.ones(8)),
    "dst": lambda k, x: k.call(native.CAST, torch.ones(8), x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(8, dtype=torch.float64),
        torch.ones(7),
        torch.ones(2, 4),
        torch.ones(16)[::2],
        torch.ones(8, device="meta"),
    ],
    ids=["dtype", "numel", "shape", "strides", "device"],
)
def test_wrong_tensors_are_refused_by_name(name: str, wrong: torch.Tensor) -> None:
    own = {"out": torch.bfloat16, "param": torch.bfloat16, "low": torch.int16}.get(name)
    if own is not None and wrong.dtype == torch.float32:
        wrong = wrong.to(own) if wrong.stride() != (2,) else torch.ones(16, dtype=own)[::2]
    for variant in native.available_variants():
        with pytest.raises(ValueError, match=rf"\b({name}|exp_avg|x)\b"):
            CALLS[name](kernels(variant), wrong)


@pytest.mark.parametrize("position", range(6))
def test_adam_split_refuses_each_wrong_tensor_by_name(position: int) -> None:
    tensors = [HALF, LOW, torch.ones(8), torch.ones(8), torch.ones(8), HALF.clone()]
    name = ("param", "low", "exp_avg", "exp_avg_sq", "grad", "out")[position]
    for wrong in (torch.ones(8, dtype=torch.float16), tensors[position][:7]):
        given = [*tensors[:position], wrong, *tensors[position + 1 :]]
        # The first gives the number of elements that the others are held to.
        with pytest.raises(ValueError, match=rf"\b({name if position or wrong.numel() == 8 else 'low'})\b"):
            kernels("torch").call(native.ADAM_SPLIT, *given, scalars=SCALARS)


def test_other_wrong_arguments_are_refused() -> None:
    mine = kernels("torch")
    with pytest.raises(ValueError, match=r"out has to be .* of 2 elements"):
        mine.call(native.SUM_SQUARES, torch.ones(10), torch.zeros(1, dtype=torch.float64), first=native.SUM_BLOCK - 5)
    with pytest.raises(ValueError, match="first"):
        mine.call(native.SUM_SQUARES, torch.ones(1), torch.zeros(1, dtype=torch.float64), first=-native.SUM_BLOCK)
    with pytest.raises(ValueError, match="one of them has to be float32"):
        mine.call(native.CAST, torch.ones(8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.float16))
    with pytest.raises(ValueError, match="counted from 1"):
        native.AdamScalars.at(step=0, lr=1, betas=(0.9, 0.9), eps=0, weight_decay=0, decoupled=True)


@pytest.mark.parametrize(
    ("first", "n", "blocks"),
    [(0, 0, 0), (0, 1, 1), (0, 65536, 1), (0, 65537, 2), (65535, 1, 1), (65535, 2, 2), (65536, 65536, 1), (7, 0, 0)],
)
def test_blocks_touched(first: int, n: int, blocks: int) -> None:
    assert native.sum_blocks(first, n) == blocks


@pytest.mark.parametrize(
    ("step", "lr", "beta1", "beta2"), [(1, 1e-3, 0.9, 0.999), (3, 0.3, 0.7, 0.95), (10**6, 7e-5, 0.0, 0.99)]
)
def test_scalars_are_those_of_the_contract_in_double_rounded_once(
    step: int, lr: float, beta1: float, beta2: float
) -> None:
    found = native.AdamScalars.at(
        step=step, lr=lr, betas=(beta1, beta2), eps=1e-8, weight_decay=0.1, decoupled=False, scale=0.5
    )
    wanted = {
        "neg_step_size": -(lr / (1 - beta1**step)),
        "sqrt_bias_correction2": (1 - beta2**step) ** 0.5,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "scale": 0.5,
        "weight_decay": 0.1,
        "eps": 1e-8,
    }
    assert {name: getattr(found, name) for name in wanted} == {name: np.float32(x) for name, x in wanted.items()}
    assert (found.decay, found.add_decay) == (1, 1)
    decoupled = native.AdamScalars.at(
        step=step, lr=lr, betas=(beta1, beta2), eps=1e-8, weight_decay=0.1, decoupled=True
    )
    assert (decoupled.decay, decoupled.add_decay) == (np.float32(1 - lr * 0.1), 0)


@pytest.mark.parametrize("variant", native.available_variants())
def test_written_tensors_get_a_new_version(variant: str) -> None:
    mine = kernels(variant)
    tensors = [torch.ones(8) for _ in range(3)]
    grad, out = torch.ones(8), torch.ones(8, dtype=torch.bfloat16)
    sums = torch.zeros(1, dtype=torch.float64)
    before = [x._version for x in (*tensors, out, sums, grad)]
    mine.call(native.ADAM, *tensors, grad, out, scalars=SCALARS)
    mine.call(native.SUM_SQUARES, grad, sums)
    after = [x._version for x in (*tensors, out, sums, grad)]
    assert all(new > old for old, new in zip(before[:-1], after[:-1], strict=True))
    assert after[-1] == before[-1], "grad is only read"
    low, param, back = LOW.clone(), HALF.clone(), torch.ones(8)
    written = (low, tensors[1], tensors[2], out)
    for kernel, given, changed in (
        (native.ADAM_SPLIT, (param, low, tensors[1], tensors[2], grad, out), written),
        (native.SPLIT, (tensors[0], low, tensors[1], param), (low, tensors[1], param)),
        (native.JOIN, (param, low, tensors[1], tensors[0], back), (tensors[0], back)),
        (native.ACCUMULATE, tensors[:2], tensors[:1]),
        (native.CAST, tensors[:2], tensors[1:2]),
    ):
        read = [y for y in given if not any(y is one for one in changed)]
        before, before_read = ([y._version for y in several] for several in (changed, read))
        mine.call(kernel, *given, scalars=SCALARS if kernel is native.ADAM_SPLIT else None)
        assert all(y._version > old for old, y in zip(before, changed, strict=True)), kernel.name
        assert [y._version for y in read] == before_read, kernel.name


def test_cpu_model_names_this_cpu() -> None:
    name, flags = native.cpu_model()
    assert name
    if "avx2" in native.available_variants():
        assert "avx2" in flags


# ---- the finished library

LIBRARY = native.library_path()
needs_library = pytest.mark.skipif(
    LIBRARY is None or shutil.which("objdump") is None, reason="no C library, or no objdump to read it with"
)


def code_of(section: str) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", "-j", section, str(LIBRARY)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_library
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 registers")
@pytest.mark.parametrize(
    ("section", "has", "has_not"),
    [
        (".text", None, r"[yz]mm|%k[0-7]"),
        ("offload_baseline", "xmm", r"[yz]mm|%k[0-7]|\bv\w+ .*xmm"),
        ("offload_avx2", "ymm", r"zmm|%k[0-7]|[xy]mm(1[6-9]|2\d|3[01])\b"),
        ("offload_avx512", "zmm", None),
    ],
)
def test_no_instruction_strays_into_another_variant(section: str, has: str | None, has_not: str | None) -> None:
    code = code_of(section)
    assert has is None or has in code
    if has_not is not None:
        strays = [line for line in code.splitlines() if re.search(has_not, line)]
        assert not strays, strays[:5]


@needs_library
def test_every_section_of_code_is_known_and_no_multiply_is_fused_with_an_add() -> None:
    headers = subprocess.run(["objdump", "-h", str(LIBRARY)], check=True, capture_output=True, text=True).stdout
    code = re.findall(r"^\s*\d+ (\S+).*\n.*\bCODE\b", headers, re.MULTILINE)
    allowed = {".init", ".plt", ".plt.got", ".plt.sec", ".text", ".fini"}
    ours = {section for section in code if section.startswith("offload_")}
    assert ours
    assert set(code) <= ours | allowed
    for section in code:
        fused = [
            line
            for line in code_of(section).splitlines()
            if re.search(r"vfn?m(add|sub)|\bf?n?ml[as]\b|fn?m(add|sub)", line)
        ]
        assert not fused, fused[:5]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_configures_without_a_working_compiler(tmp_path: Path, compiler: str) -> None:
    sources = Path(native.__file__).parents[2] / "kernels"
    if not sources.is_dir():
        pytest.skip("the kernels' sources are not here")
    environment = os.environ | {"CC": compiler}
    command = ["cmake", "-S", str(sources), "-B", str(tmp_path), "-DCMAKE_BUILD_TYPE=Release"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch fallback" in " ".join(done.stderr.split())
