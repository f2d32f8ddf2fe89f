"""Who runs in `offload bench adam`: the limit, this library's variants, and whatever else is installed.

A contestant is a function without arguments that does one whole step of AdamW on `States`, or, for the
mixed job, also reads the bf16 gradient and writes the bf16 copy; casts go into buffers made beforehand.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload import native
from offload.devices.copies import HostCopier
from offload.storage.arena import Arena

LIMIT = "limit"
LR, BETAS, EPS, WEIGHT_DECAY, STEP = 1e-4, (0.9, 0.999), 1e-8, 0.01, 100

Step = Callable[[], object]


class States:
    """What all contestants update: n parameters, in huge pages where the kernel grants them."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.master, self.exp_avg, self.exp_avg_sq = (_allocate(n, torch.float32) for _ in range(3))
        self.grad32 = _allocate(n, torch.float32).normal_(std=1e-2)
        self.grad16 = _allocate(n, torch.bfloat16).copy_(self.grad32)
        self.out = _allocate(n, torch.bfloat16)
        self.reset()

    def reset(self) -> None:
        """Ordinary values: the limit shuffles the states, and denormals are slow on some CPUs."""
        self.master.fill_(0.5)
        self.exp_avg.fill_(1e-3)
        self.exp_avg_sq.fill_(1e-4)


def _allocate(n: int, dtype: torch.dtype) -> Tensor:
    """From an arena, as in training: private memory, on huge pages."""
    size_bytes = n * dtype.itemsize
    return Arena(size_bytes, HostCopier()).carve(size_bytes).view(dtype)


def contestants(states: States, job: str, threads: int, skipped: dict[str, None]) -> dict[str, Step]:
    """Every contestant that runs here, each warmed up by two steps; reasons for the others go into
    `skipped`."""
    torch.set_num_threads(threads)
    grad, out = (states.grad32, None) if job == "fp32" else (states.grad16, states.out)
    calls: dict[str, Step] = {}
    scalars = native.AdamScalars.at(step=STEP, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, decoupled=True)
    state = (states.master, states.exp_avg, states.exp_avg_sq)
    for variant in native.available_variants():
        kernels = native.load(threads, variant)
        if variant in ("avx512", "avx2", "neon"):
            calls[f"{LIMIT} {variant}"] = _bind(kernels.limit, *state, grad, out)
        calls[f"offload {variant}"] = _bind(kernels.adam, *state, grad, out, scalars)
    for name, make in (
        ("torch fused", _torch_fused),
        ("torch.compile", _torch_compile),
        ("DeepSpeed", _deepspeed),
        ("numba", _numba),
    ):
        package = name.lower() if "torch" not in name else "torch"
        if importlib.util.find_spec(package) is None:
            skipped[f"{name}: not installed"] = None
            continue
        try:
            calls[name] = make(states, grad, out, threads)
            states.reset()
            calls[name]()
        except Exception as error:  # whatever a peer raises, it takes no part
            calls.pop(name, None)
            first_line = (str(error).strip() or repr(error)).splitlines()[0]
            skipped[f"{name}: {type(error).__name__}: {first_line}"] = None
    for call in calls.values():
        call()
    states.reset()
    return calls


def _bind(function: Callable[..., object], *arguments: Any) -> Step:
    return lambda: function(*arguments)


def _with_casts(step: Step, states: States, out: Tensor | None) -> Step:
    """What an optimizer without 16-bit gradients and copies needs around it."""
    if out is None:
        return step

    def mixed() -> None:
        states.grad32.copy_(states.grad16)
        step()
        states.out.copy_(states.master)

    return mixed


def _torch_fused(states: States, grad: Tensor, out: Tensor | None, threads: int) -> Step:
    parameter = torch.nn.Parameter(states.master)
    parameter.grad = states.grad32
    optimizer = torch.optim.AdamW([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(STEP)),
        "exp_avg": states.exp_avg,
        "exp_avg_sq": states.exp_avg_sq,
    }
    return _with_casts(optimizer.step, states, out)


def _torch_compile(states: States, grad: Tensor, out: Tensor | None, threads: int) -> Step:
    import torch._dynamo
    import torch._inductor.config

    beta1, beta2 = BETAS
    step_size, root = LR / (1 - beta1**STEP), (1 - beta2**STEP) ** 0.5

    def step(p: Tensor, m: Tensor, v: Tensor, g: Tensor, o: Tensor | None) -> None:
        g = g.float()
        p.mul_(1 - LR * WEIGHT_DECAY)
        m.add_((1 - beta1) * (g - m))
        v.mul_(beta2).add_((1 - beta2) * g * g)
        p.sub_(step_size * m / (v.sqrt() / root + EPS))
        if o is not None:
            o.copy_(p)

    # The number of threads is compiled in.
    torch._dynamo.reset()
    torch._inductor.config.cpp.threads = threads
    compiled = torch.compile(step, dynamic=False)

    def call() -> None:
        with torch.no_grad():
            compiled(states.master, states.exp_avg, states.exp_avg_sq, grad, out)

    return call


def _deepspeed(states: States, grad: Tensor, out: Tensor | None, threads: int) -> Step:
    parameter = torch.nn.Parameter(states.master)
    parameter.grad = states.grad32
    optimizer = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
        [parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True
    )
    optimizer.state[parameter] = {"step": STEP, "exp_avg": states.exp_avg, "exp_avg_sq": states.exp_avg_sq}
    return _with_casts(optimizer.step, states, out)


def _numba(states: States, grad: Tensor, out: Tensor | None, threads: int) -> Step:
    import numpy as np

    numba: Any = importlib.import_module("numba")

    beta1, beta2 = BETAS
    f = np.float32
    decay, one_minus_beta1, keep, one_minus_beta2 = f(1 - LR * WEIGHT_DECAY), f(1 - beta1), f(beta2), f(1 - beta2)
    step_size, root, eps = f(LR / (1 - beta1**STEP)), f((1 - beta2**STEP) ** 0.5), f(EPS)

    @numba.njit(parallel=True, fastmath=False)
    def step(p, m, v, g):  # type: ignore[no-untyped-def]
        for i in numba.prange(p.size):
            m[i] += one_minus_beta1 * (g[i] - m[i])
            v[i] = v[i] * keep + one_minus_beta2 * g[i] * g[i]
            p[i] = p[i] * decay - step_size * m[i] / (np.sqrt(v[i]) / root + eps)

    arrays = [x.numpy() for x in (states.master, states.exp_avg, states.exp_avg_sq, states.grad32)]

    def call() -> None:
        numba.set_num_threads(threads)
        step(*arrays)

    return _with_casts(call, states, out)
