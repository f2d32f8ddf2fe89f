"""A kernel is a row, a C function and operations of torch: rows are those of the sources, and a new one is bound."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from offload import native
from offload.native import library, table
from offload.native.pool import declare
from offload.native.table import FLOATS, FP32, Argument, Kernel
from offload.native.torch_kernels import TorchKernels

SOURCES = Path(native.__file__).parents[2] / "kernels"
needs_sources = pytest.mark.skipif(not SOURCES.is_dir(), reason="the kernels' sources are not here")


@needs_sources
def test_each_c_function_has_a_row_and_each_row_a_c_function() -> None:
    found = [name for path in SOURCES.glob("*.c") for name in re.findall(r"^KERNEL\((\w+)\)", path.read_text(), re.M)]
    assert sorted(found) == sorted(kernel.name for kernel in table.KERNELS)


@needs_sources
def test_numbers_and_scalars_are_those_of_the_header() -> None:
    header = (SOURCES / "kernels.h").read_text()
    numbers = dict(re.findall(r"OFFLOAD_(\w+) = (\d)", header))
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16"}
    names |= {torch.float64: "F64", torch.uint8: "U8"}
    assert {names[dtype]: number for dtype, number in table.TYPES.items()} | {"NONE": table.NO_TENSOR} == {
        name: int(number) for name, number in numbers.items()
    }
    body = header.split("struct offload_adam_scalars {")[1].split("}")[0]
    fields = re.findall(r"\w+(?=[,;])", re.sub(r"/\*.*?\*/", "", body))
    assert fields == [field[0] for field in native.AdamScalars._fields_]
    body = header.split("struct offload_dithered_scalars {")[1].split("}")[0]
    assert re.findall(r"\w+(?=;)", body) == ["adam", *(field[0] for field in native.DitheredScalars._fields_)]
    assert native.DitheredScalars.step.offset == ctypes.sizeof(native.AdamScalars)


def test_only_the_benchmarks_limit_has_no_operations_of_torch() -> None:
    assert [kernel.name for kernel in table.KERNELS if not hasattr(TorchKernels, kernel.name)] == ["limit"]
    tensors = [torch.ones(8) for _ in range(4)]
    with pytest.raises(ValueError, match="torch has no operations for limit"):
        native.load(1, "torch").call(native.LIMIT, *tensors, None)


def test_calls_that_do_not_fit_their_row_are_refused() -> None:
    mine = native.load(1, "torch")
    x = torch.ones(8)
    with pytest.raises(ValueError, match=r"accumulate takes 2 tensors \(acc, x\), not 3"):
        mine.call(native.ACCUMULATE, x, x.clone(), x.clone())
    with pytest.raises(ValueError, match="x is None: accumulate needs it"):
        mine.call(native.ACCUMULATE, x, None)
    with pytest.raises(ValueError, match="master is None"):
        mine.call(native.ADAM, None, x, x, x, None)
    with pytest.raises(ValueError, match="adam takes AdamScalars, not NoneType"):
        mine.call(native.ADAM, x, x.clone(), x.clone(), x.clone(), None)
    with pytest.raises(ValueError, match="accumulate takes NoneType, not c_int_Array"):
        mine.call(native.ACCUMULATE, x, x.clone(), scalars=(ctypes.c_int * 3)())  # type: ignore[arg-type]
    half = torch.zeros(8, dtype=torch.bfloat16)
    for grad, out in ((x, half), (half, None)):
        with pytest.raises(ValueError, match="out is for 16-bit gradients"):
            mine.call(native.LIMIT, x, x.clone(), x.clone(), grad, out)
    with pytest.raises(ValueError, match="multiple of 64 bytes"):
        mine.call(native.LIMIT, x[:7], x[:7].clone(), x[:7].clone(), half[:7], torch.zeros(99, dtype=half.dtype)[1:8])


class Power(ctypes.Structure):
    _fields_ = (("factor", ctypes.c_float), ("bias", ctypes.c_float))


SCALED = Kernel(
    "scaled",
    (
        Argument("x", FP32, is_written=True),
        Argument("scales", FP32, block=256),
        Argument("more", FLOATS, is_optional=True),
    ),
    Power,
)
SOURCE = """
#include "vec.h"
KERNEL(scaled) {
    const struct { float factor, bias; } *s = scalars;
    float *x = TENSOR(0);
    const float *scales = (const float *)tensors[1] + first / 256, *more = TENSOR(2);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * scales[(first + i) / 256 - first / 256] * s->factor + s->bias + (more ? more[i] : 0);
}
"""


@needs_sources
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("first", [0, 100, 70_000])
def test_a_c_function_and_a_row_make_a_kernel(
    threads: int, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with scalars, a tensor that may be left out, and one element for each block, as 8-bit states have them."""
    (tmp_path / "scaled.c").write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-O1", "-ffp-contract=off", f"-I{SOURCES}", "-DOFFLOAD_VARIANT=baseline"]
    sources = [str(tmp_path / "scaled.c"), str(SOURCES / "pool.c")]
    subprocess.run([*command, "-pthread", "-o", str(tmp_path / "scaled.so"), *sources], check=True)
    monkeypatch.setattr(library, "KERNELS", (SCALED,))
    found_library = ctypes.CDLL(str(tmp_path / "scaled.so"))
    declare(found_library)
    compiled = library.Library(found_library, "baseline")
    mine = native.Kernels(threads, compiled)
    n = 300_001
    rng = np.random.default_rng(1)
    x, more = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    scales = rng.standard_normal((first + n - 1) // 256 - first // 256 + 1).astype(np.float32)
    each = scales[np.arange(first, first + n) // 256 - first // 256]
    for last in (None, more):
        found = torch.from_numpy(x.copy())
        version = found._version
        given = None if last is None else torch.from_numpy(last)
        mine.call(SCALED, found, torch.from_numpy(scales), given, first=first, scalars=Power(0.5, 2))
        wanted = x * each * np.float32(0.5) + np.float32(2) + (np.float32(0) if last is None else last)
        assert np.array_equal(found.numpy(), wanted)
        assert found._version > version
    with pytest.raises(ValueError, match=rf"scales has to be .* of {len(scales)} elements"):
        mine.call(SCALED, found, torch.from_numpy(scales[1:]), None, first=first, scalars=Power(1, 0))
    mine.close()
