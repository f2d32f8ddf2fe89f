"""The cases of bench/gpu.py, which run in its worker.

Each is a function of a `Context` and of the case's arguments. It returns its result, and raises what goes wrong.
`offload` is imported where it is used: what needs only torch runs where that fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import gzip
import hashlib
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.gpu import FULL, GB, GIB, LAST_CHARACTERS, MIB, PLACEMENTS, TINY, TOYS, Options, Sizes, cases
from bench.gpu_machine import gpu
from offload.demo.gpt import GPT, VOCABULARY, GPTConfig

TOY_STEPS = 6
TOY_LR, TOY_CLIP = 1e-2, 0.5
THREADS_AFTER_S = 60
MOST_FILE_BYTES = 15 * MIB
TRAIN_S = 20
"""Steps that are timed take about so long altogether, and are never fewer than two."""
CLOSE_TO_TORCH = 0.05
"""Of the small run's losses, from plain torch's. A step differs by some ulps of fp32, which bf16 then makes larger."""


class SkippedError(Exception):
    """This machine has not what a case needs."""


@dataclass
class Context:
    """Attributes: scratch: an empty folder, of this case; out: that of results; say: called with a part of the result
    that is there before its end; program: this one, to start it once more for a single case."""

    device: torch.device
    sizes: Sizes
    scratch: Path
    out: Path
    program: Sequence[str]
    say: Callable[[Mapping[str, Any]], None]
    expected: dict[str, Bits] = field(default_factory=dict)


# The small runs: what they compute has the bits of tier="cpu".

Bits = dict[str, str]
"""Digests by name: each step's loss and norm, and at the end each parameter and state."""


def digest(values: Tensor | float) -> str:
    data = values.detach().cpu().contiguous().flatten() if isinstance(values, Tensor) else torch.tensor(values)
    return hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class Reentrant(GPT):
    """With the older kind of torch's checkpoints, whose backward begins another one."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        logits: Tensor = self.head(self.norm(x))
        assert targets is not None
        return logits, F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


TRAININGS = ("accumulation", "fp16", "reentrant", "torch-clip", "compiled", "8bit", "bf16", "muon")
"""What is another training: its bits are compared with those of the same one with tier="cpu". What else is special
changes no bit."""


@dataclass
class Toy:
    """One small training. Attributes: options: of OffloadZero, and `split_master`; bits, losses: what it computed."""

    context: Context
    special: str
    options: Mapping[str, Any]
    bits: Bits = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accumulation = 2 if self.special == "accumulation" else 1
        self._folder = self.context.scratch / "run"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._data = torch.Generator().manual_seed(11)

    def run(self) -> Toy:
        side = torch.Stream(self.context.device) if self.special == "side-stream" else contextlib.nullcontext()
        torch.accelerator.synchronize()
        with side:
            self._train()
        torch.accelerator.synchronize()
        return self

    def _train(self) -> None:
        model = self._model()
        if self.special == "refused-pin":
            self._refuse_a_pin()
        optimizer = self._held(model)
        scaler = torch.amp.GradScaler(
            self.context.device.type, init_scale=256.0, growth_interval=2, enabled=self.special == "fp16"
        )
        for step in range(TOY_STEPS):
            if self.special == "parked" and step == TOY_STEPS // 2:
                model.cpu()
                model.to(self.context.device)
            if self.special == "resumed" and step == TOY_STEPS // 2:
                optimizer.commit()
                optimizer.close()
                model = self._model()
                optimizer = self._held(model, resume=True)
            batches = [self._batch() for _ in range(self.accumulation)]
            if self.special == "out-of-memory" and step == 2:
                self._run_out_of_memory(model, optimizer, batches[0])
            loss, norm = self._step(model, optimizer, scaler, batches)
            self.bits |= {f"loss {step}": digest(loss), f"norm {step}": digest(norm)}
            self.losses.append(loss)
        optimizer.synchronize()
        self.stats = optimizer.stats()
        for name, parameter in model.named_parameters():
            with optimizer.gathered(parameter):
                self.bits[name] = digest(parameter)
            for kind, values in optimizer.state_of(parameter).items():
                self.bits[f"{name}, {kind}"] = digest(values)
        optimizer.close()
        if self.special == "closed":
            for name, parameter in model.named_parameters():
                self.bits[name] = digest(parameter)
            tokens, targets = self._batch()
            model(tokens, targets)[1].backward()
            torch.optim.SGD(model.parameters()).step()

    def _model(self) -> nn.Module:
        kind = Reentrant if self.special == "reentrant" else GPT
        model = kind(GPTConfig(*self.context.sizes.toy), checkpoint_activations=True).to(self.context.device)
        if self.special == "compiled":
            torch.compiler.reset()
            for block in model.blocks:
                block.compile(backend="inductor" if self.context.device.type == "cuda" else "aot_eager")
        return model

    def _held(self, model: nn.Module, **more: Any) -> Any:
        from offload import OffloadZero, Tuning

        options = dict(self.options)
        tuning = Tuning(chunk=self.context.sizes.chunk, split_master=options.pop("split_master", None))
        options |= {"tuning": tuning, "accumulation": self.accumulation}
        if self.special == "fp16":
            options["compute_dtype"] = torch.float16
        if self.special in ("8bit", "bf16"):
            options["states"] = self.special
        if self.special == "resumed":
            options["commit_every"] = 0
        make = muon_and_adamw if self.special == "muon" else adamw
        plain = make(dict(model.named_parameters()), TOY_LR)
        return OffloadZero(model, plain, **on_the_disk(options, model, plain, self._folder), **more)

    def _batch(self) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (2, self.context.sizes.toy[3] + 1), generator=self._data)
        tokens = tokens.to(self.context.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _step(
        self, model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[float, float]:
        """Returns: the last loss, and the norm of the gradients."""
        for tokens, targets in batches:
            loss = model(tokens, targets)[1]
            scaler.scale(loss / self.accumulation).backward()
        scaler.unscale_(optimizer)
        if self.special == "torch-clip":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), TOY_CLIP)
        else:
            norm = optimizer.clip_grad_norm_(TOY_CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return float(loss.item()), float(norm.item())

    def _run_out_of_memory(self, model: Any, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
        """In the middle of a forward; then the loop begins the step anew."""
        total = torch.accelerator.get_memory_info(self.context.device)[1]

        def fail(*_: object) -> None:
            torch.empty(2 * total, dtype=torch.uint8, device=self.context.device)

        handle = model.blocks[1].register_forward_pre_hook(fail)
        try:
            model(*batch)[1].backward()
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
        else:
            raise AssertionError("the device gave twice its memory")
        finally:
            handle.remove()

    def _refuse_a_pin(self) -> None:
        """The driver refuses what is page-locked already. Then the device must go on as if nobody had asked."""
        from offload import BudgetError
        from offload.devices.copies import copier_for

        copier = copier_for(self.context.device)
        memory = torch.frombuffer(mmap.mmap(-1, MIB), dtype=torch.uint8)
        copier.pin(memory)
        try:
            copier.pin(memory)
        except BudgetError:
            torch.ones(8, device=self.context.device).add_(1).sum().item()
        else:
            raise AssertionError("the driver page-locked the same memory twice")
        finally:
            copier.unpin(memory)


Make = Callable[[Mapping[str, Tensor], float], list[torch.optim.Optimizer]]
"""Optimizers of parameters, or of their masters, by name, and of a learning rate."""


def adamw(params: Mapping[str, Tensor], lr: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(params.values(), lr=lr)]


def muon_and_adamw(params: Mapping[str, Tensor], lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for all else."""
    matrices = [name for name, param in params.items() if name.startswith("blocks.") and param.ndim == 2]
    chosen = torch.optim.Muon([params[name] for name in matrices], lr=lr, adjust_lr_fn="match_rms_adamw")
    return [chosen, *adamw({name: param for name, param in params.items() if name not in matrices}, lr)]


def on_the_disk(options: Mapping[str, Any], model: Any, plain: Any, folder: Path) -> dict[str, Any]:
    """Options with a path and the least RAM, where NVMe is one of the tiers: with more RAM than it needs, all chunks
    would stay there."""
    from offload.planner import least_cpu_memory

    found = dict(options)
    if "nvme" in found.values():
        if found.get("activation_tier") == "nvme":
            found["activation_memory"] = 2 * model.config.context * model.config.width * 2  # of one unit
        least = {name: value for name, value in found.items() if name not in ("tier", "resume")}
        found |= {"cpu_memory": least_cpu_memory(model, plain, **least), "path": folder}
    return found


def require_streamed(options: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
    """Raises: AssertionError if what is called a run on NVMe read nothing from there."""
    if "nvme" in (options.get("tier"), options.get("param_tier")):
        assert stats["nvme_read_bytes"] > 0, "nothing was read from NVMe"
    if options.get("activation_tier") == "nvme":
        assert stats["activation_read_bytes"] > 0, "no activation was read from NVMe"
    if "param_tier" in options:
        assert stats["param_tier"] == options["param_tier"], f"parameters are on {stats['param_tier']}"


def toy(context: Context, special: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A small training, beside the same with tier="cpu"; that one is beside plain torch."""
    torch.use_deterministic_algorithms(True)
    found = Toy(context, special, options).run()
    require_streamed(options, found.stats)
    result = {"bits": hashlib.sha256(repr(sorted(found.bits.items())).encode()).hexdigest()[:16]}
    result |= {name: found.stats[name] for name in ("nvme_read_bytes", "host_to_device_bytes", "kernel", "io_engine")}
    if not special and options == PLACEMENTS["cpu"]:
        context.expected[""] = found.bits
        apart = max(abs(a - b) / b for a, b in zip(found.losses, toy_losses_of_torch(context), strict=True))
        says = f"its losses are within {apart:.1e} of plain torch's"
        return {**result, "status": "ok" if apart < CLOSE_TO_TORCH else "differs", "says": says}
    training = special if special in TRAININGS else ""
    if training not in context.expected:
        context.expected[training] = Toy(context, training, PLACEMENTS["cpu"]).run().bits
    expected = context.expected[training]
    others = [name for name in expected if found.bits.get(name) != expected[name]]
    if not others and found.bits.keys() == expected.keys():
        return {**result, "status": "ok", "says": 'bits equal tier="cpu"'}
    return {**result, "status": "differs", "says": f"{len(others)} of {len(expected)} differ, first {others[:3]}"}


def toy_losses_of_torch(context: Context) -> list[float]:
    """Of the same training by AdamW on fp32 masters, without this library."""
    like = Toy(context, "", {})
    contestant = Torch(like._model(), lr=TOY_LR, clip=TOY_CLIP)
    losses = []
    for _ in range(TOY_STEPS):
        loss = contestant.model(*like._batch())[1]
        loss.backward()
        contestant.step()
        losses.append(float(loss.item()))
    return losses


def launch_blocking(context: Context) -> dict[str, Any]:
    """The bits where the host waits for each kernel are those where it does not: no copy is too early by luck."""
    here = toy(context, *TOYS["streamed-nvme"])
    there = _again("toy-streamed-nvme", context, [], {"CUDA_LAUNCH_BLOCKING": "1"})
    if there.get("status") != "ok" or here["status"] != "ok":
        raise RuntimeError(f"{here['says']}; with CUDA_LAUNCH_BLOCKING=1: {there.get('says')}")
    is_same = here["bits"] == there["bits"]
    return {"status": "ok" if is_same else "differs", "says": "bits equal CUDA_LAUNCH_BLOCKING=1" if is_same else "no"}


def memcheck(context: Context) -> dict[str, Any]:
    """A small training under compute-sanitizer, without the caching allocator: that hides uses of freed memory."""
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        raise SkippedError("there is no compute-sanitizer")
    # What the driver answers is torch's to judge: it asks for what may fail, and looks.
    before = [found, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", "--print-limit", "20"]
    result = _again("toy-streamed-cpu", context, before, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    words = [line for line in result["output"].splitlines() if line.startswith("=========")]
    is_good = result.get("status") == "ok" and not result["exit_code"]
    says = f"{words[-1] if words else 'it said nothing'}; the run: {result.get('says', 'no result')}"
    log = {} if is_good else {"log": result["output"][-LAST_CHARACTERS:]}
    return {"status": "ok" if is_good else "failed", "says": says, **log}


def _again(name: str, context: Context, before: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The result of a case in a process of its own, with "output" and "exit_code"."""
    command = [*before, *context.program, "--one", name]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,  # the worker's has the next cases
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith('{"status"')]
    result: dict[str, Any] = json.loads(found[-1]) if found else {"says": done.stdout[-300:]}
    return {**result, "output": done.stdout, "exit_code": done.returncode}


# Parts.


class Registered:
    """Memory like the arena's, without this library: huge pages where they are to be had, page-locked."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        runtime: Any = getattr(torch.get_device_module(device), "cudart", None)
        if runtime is None:
            raise SkippedError(f"{device} cannot page-lock memory that is there")
        self._runtime = runtime()

    def populate(self, threads: int = 8) -> None:
        """Gets all pages, from several threads."""
        piece = math.ceil(self.nbytes / threads)
        starts = range(0, self.nbytes, piece)

        def fill(start: int) -> None:
            ctypes.memset(self.tensor.data_ptr() + start, 1, min(piece, self.nbytes - start))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, starts))

    def lock(self) -> None:
        """Raises: RuntimeError if the driver refuses."""
        error = int(self._runtime.cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0))
        if error:
            raise RuntimeError(f"cudaHostRegister: error {error}")

    def unlock(self) -> None:
        self._runtime.cudaHostUnregister(self.tensor.data_ptr())


def link(context: Context) -> dict[str, Any]:
    """GB/s in each direction alone and beside the other, in memory that the driver locked and in torch's own."""
    figures: dict[str, float] = {}
    device = context.device
    for nbytes in context.sizes.copies:
        there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        locked = [Registered(nbytes, device) for _ in range(2)]
        for one in locked:
            one.populate(1)
            one.lock()
        pinned = [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
        try:
            for kind, here in (("", [one.tensor for one in locked]), (" from torch's", pinned)):
                for way in ("up", "down", "both"):
                    seconds = copied(here, there, way)
                    each = " each" if way == "both" else ""
                    figures[f"{_size(nbytes)} {way}{kind}, GB/s{each}"] = nbytes / GB / seconds
                    if nbytes < MIB:
                        figures[f"{_size(nbytes)} {way}{kind}, us"] = 1e6 * seconds
        finally:
            torch.accelerator.synchronize()
            for one in locked:
                one.unlock()
        context.say({"figures": figures})
    return {"figures": figures, "gpu": gpu(), "says": f"{len(figures)} figures"}


def copied(here: Sequence[Tensor], there: Sequence[Tensor], way: str) -> float:
    """Seconds of a copy: the median of rounds of many."""
    up, down = torch.Stream(there[0].device), torch.Stream(there[0].device)
    count = max(1, min(200, 128 * MIB // here[0].numel()))
    times = []
    for _ in range(6):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            if way != "down":
                with up:
                    there[0].copy_(here[0], non_blocking=True)
            if way != "up":
                with down:
                    here[1].copy_(there[1], non_blocking=True)
        torch.accelerator.synchronize()
        times.append((time.perf_counter() - began) / count)
    return statistics.median(times[1:])


def _size(nbytes: int) -> str:
    return (
        f"{nbytes // GIB} GiB"
        if nbytes >= GIB
        else f"{nbytes // MIB} MiB"
        if nbytes >= MIB
        else f"{nbytes // 1024} KiB"
    )


def pin(context: Context) -> dict[str, Any]:
    """Seconds a GiB of page-locking memory: before any page is there, and after eight threads have got the pages."""
    figures: dict[str, float] = {}
    for nbytes in context.sizes.pinned:
        for kind in ("empty", "populated"):
            memory = Registered(nbytes, context.device)
            spent = {}
            steps = {"populate": memory.populate} if kind == "populated" else {}
            for name, step in {**steps, "lock": memory.lock, "unlock": memory.unlock}.items():
                began = time.perf_counter()
                step()
                spent[name] = (time.perf_counter() - began) / (nbytes / GIB)
            figures[f"{_size(nbytes)} {kind}, s a GiB"] = spent.pop("lock")
            figures |= {f"{_size(nbytes)} {kind}, {name}, s a GiB": value for name, value in spent.items()}
            del memory
            context.say({"figures": figures})
    huge = [line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("thp_fault")]
    return {"figures": figures, "huge pages": huge, "says": f"{len(figures)} figures"}


def adam_cpu(context: Context) -> dict[str, Any]:
    """GB/s of the CPU's Adam kernel by threads, beside moving the same bytes without arithmetic."""
    from bench.limits import SCALARS, States
    from offload import native

    states, figures = States(context.sizes.adam), {}
    state = (states.master, states.exp_avg, states.exp_avg_sq)
    for threads in context.sizes.threads:
        kernels = native.load(threads)
        adam = partial(kernels.call, native.ADAM, *state, states.grad, states.out, scalars=SCALARS)
        calls: dict[str, Callable[[], object]] = {"": adam}
        if kernels.variant != "torch":
            calls["limit, "] = partial(kernels.call, native.LIMIT, *state, states.grad, states.out)
        for name, call in calls.items():
            figures[f"{name}{threads} threads, GB/s"] = 28 * states.n / GB / seconds_of(call)
            states.reset()
        kernels.close()
    return {"figures": figures, "says": f"kernel {native.available_variants()[0]}, {native.usable_cpus()} usable CPUs"}


def adam_device(context: Context) -> dict[str, Any]:
    """GB/s of Adam and of sums of squares on the device, compiled and by torch's operations, beside torch's AdamW."""
    from bench.limits import SCALARS
    from offload import native
    from offload.devices.copies import stream_handle
    from offload.native.torch_kernels import scratch_bytes

    n, device = context.sizes.adam, context.device
    scratch = torch.zeros(scratch_bytes(n), dtype=torch.uint8, device=device)
    master, exp_avg, exp_avg_sq = (torch.full((n,), value, device=device) for value in (0.5, 1e-3, 1e-4))
    grad = torch.full((n,), 1e-3, dtype=torch.bfloat16, device=device)
    out = torch.zeros(n, dtype=torch.bfloat16, device=device)
    sums = torch.zeros(native.sum_blocks(0, n), dtype=torch.float64, device=device)
    figures = {}
    for stream in (partial(stream_handle, device), None):
        kernels = native.load_on(scratch, stream)
        adam_s = seconds_of(partial(kernels.call, native.ADAM, master, exp_avg, exp_avg_sq, grad, out, scalars=SCALARS))
        sum_s = seconds_of(partial(kernels.call, native.SUM_SQUARES, grad, sums))
        figures[f"{kernels.variant}: adam, GB/s"] = 28 * n / GB / adam_s
        figures[f"{kernels.variant}: sum of squares, GB/s"] = 2 * n / GB / sum_s
        context.say({"figures": figures})
    figures |= small_states_on_device(scratch, master, grad, out)
    context.say({"figures": figures})
    del scratch, kernels, out, sums, exp_avg, exp_avg_sq
    parameter = nn.Parameter(master)
    parameter.grad = grad.float()
    torch_adam = torch.optim.AdamW([parameter], fused=device.type == "cuda")
    figures["torch's adam with fp32 gradients, GB/s"] = 28 * n / GB / seconds_of(torch_adam.step)
    return {"figures": figures, "says": f"{len(figures)} figures"}


def small_states_on_device(scratch: Tensor, master: Tensor, grad: Tensor, out: Tensor) -> dict[str, float]:
    """GB/s of Adam with states of one byte and of two, compiled and by torch's operations."""
    from bench.limits import DITHERED
    from offload import native
    from offload.devices.copies import stream_handle
    from offload.native.torch_kernels import dithered_room

    n, device = len(grad), grad.device
    figures = {}
    for form, dtype, nbytes in (("bf16", torch.bfloat16, 20), ("8bit", torch.uint8, 16 + 4 / 64)):
        moments = [torch.zeros(n, dtype=dtype, device=device) for _ in range(2)]
        scales: list[Tensor | None] = [None, None]
        if form == "8bit":
            scales = [torch.zeros(-(-n // 64), dtype=torch.uint8, device=device) for _ in range(2)]
        for stream in (partial(stream_handle, device), None):
            kernels = native.load_on(scratch, stream, dithered_room(n, n))
            tensors = (master, None, *moments, *scales, grad, out)
            call = partial(kernels.call, native.ADAM_DITHERED, *tensors, scalars=DITHERED)
            figures[f"{kernels.variant}: adam, {form} states, GB/s"] = nbytes * n / GB / seconds_of(call)
    return figures


def seconds_of(call: Callable[[], object]) -> float:
    """The median of five calls, after one."""
    times = []
    for _ in range(6):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        call()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


# Whole steps.


class Contestant(ABC):
    """A model on the device and its optimizer."""

    model: nn.Module

    @abstractmethod
    def step(self) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Gives its memory back."""


class Torch(Contestant):
    """Plain torch on resident fp32 masters; the model computes in bf16."""

    def __init__(self, model: nn.Module, lr: float = 1e-4, clip: float | None = None, make: Make = adamw) -> None:
        masters = {name: param.detach().float().clone().requires_grad_() for name, param in model.named_parameters()}
        self.masters = list(masters.values())
        self.model = model.to(torch.bfloat16)
        self.optimizers = make(masters, lr)
        self._clip = clip

    def step(self) -> None:
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, self._clip)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)
                param.grad = master.grad = None


class Offload(Contestant):
    """Of this library. Args: options: of OffloadZero; where NVMe is among them, RAM is the least."""

    def __init__(self, model: nn.Module, folder: Path, make: Make = adamw, **options: Any) -> None:
        from offload import OffloadZero

        self.model, self.options = model, options
        plain = make(dict(model.named_parameters()), 1e-4)
        chosen = on_the_disk({**options, "commit_every": None}, model, plain, folder)
        self.optimizer = OffloadZero(model, plain, **chosen)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()


def new_gpt(sizes: Sizes, device: torch.device) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(*sizes.model), device="meta", checkpoint_activations=True).to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02)
    return model


def batch(tokens: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(tokens, device=device).mul(31).remainder(251).view(-1, length)


def timed_steps(contestant: Contestant, data: Tensor, most: int) -> tuple[float, list[float]]:
    """Seconds of the first step, which warms up, and of each after it: two, and more while there is time."""
    first_s = 0.0
    times: list[float] = []
    for number in range(1 + most):
        began = time.perf_counter()
        contestant.model(data, data)[1].backward()
        contestant.step()
        torch.accelerator.synchronize()
        took_s = time.perf_counter() - began
        if number:
            times.append(took_s)
        else:
            first_s = took_s
        if len(times) >= 2 and sum(times) > TRAIN_S:
            break
    return first_s, times


def train(context: Context, placement: str, tokens: int) -> dict[str, Any]:
    """Steps of a placement, between steps of plain torch before and after."""
    sizes, device = context.sizes, context.device
    torch.use_deterministic_algorithms(False)
    times: dict[str, list[float]] = {"torch": []}
    figures: dict[str, float] = {}
    result: dict[str, Any] = {"figures": figures}
    for name in ("torch", placement, "torch"):
        torch.accelerator.empty_cache()
        model = new_gpt(sizes, device)
        began = time.perf_counter()
        contestant: Contestant = (
            Torch(model) if name == "torch" else Offload(model, context.scratch / "run", **PLACEMENTS[placement])
        )
        torch.accelerator.synchronize()
        constructed_s = time.perf_counter() - began
        torch.accelerator.reset_peak_memory_stats()
        with contextlib.closing(contestant):
            data = batch(tokens, sizes.model[3], device)
            first_s, more = timed_steps(contestant, data, 8)
            times[name] = times.get(name, []) + more
            peak = torch.accelerator.max_memory_allocated() / GB
            if isinstance(contestant, Offload):
                stats = contestant.optimizer.stats()
                require_streamed(contestant.options, stats)
                figures |= {"s of construction": constructed_s, "s of the first step": first_s}
                figures["GB of the device"] = peak
                figures["GB of RAM"] = stats["peak_cpu_bytes"] / GB
                result["stats"] = {name: value for name, value in stats.items() if value is not None}
            else:
                figures |= {"torch, s of the first step": first_s, "torch, GB of the device": peak}
        del model, contestant
        step_s = {name: statistics.median(values) for name, values in times.items()}
        figures["torch, s a step"] = step_s["torch"]
        if placement in step_s:
            figures |= {"s a step": step_s[placement], "tokens/s": tokens / step_s[placement]}
            figures["x torch"] = step_s["torch"] / step_s[placement]
            if moved := stats["nvme_read_bytes"] + stats["nvme_written_bytes"]:
                # The states of a step move in the next one's forward: the last one's have not.
                figures["GB/s of NVMe"] = moved / (stats["step"] - 1) / GB / step_s[placement]
        context.say(result)
    spread = ", ".join(f"{name} {min(values):.3f}-{max(values):.3f} s" for name, values in times.items())
    return {**result, "seconds of steps": times, "says": f"{figures['x torch']:.2f} x torch; {spread}"}


def muon(context: Context) -> dict[str, Any]:
    """A step of Muon and AdamW with all states in RAM, between steps of plain torch before and after."""
    sizes, device = context.sizes, context.device
    torch.use_deterministic_algorithms(False)
    times: dict[str, list[float]] = {"torch": [], "offload": []}
    figures: dict[str, float] = {}
    for name in ("torch", "offload", "torch"):
        torch.accelerator.empty_cache()
        model = new_gpt(sizes, device)
        contestant: Contestant = (
            Torch(model, make=muon_and_adamw)
            if name == "torch"
            else Offload(model, context.scratch / "run", muon_and_adamw, tier="cpu")
        )
        torch.accelerator.reset_peak_memory_stats()
        with contextlib.closing(contestant):
            data = batch(sizes.timed[0][1], sizes.model[3], device)
            times[name] += timed_steps(contestant, data, 8)[1]
            figures[f"{name}, GB of the device"] = torch.accelerator.max_memory_allocated() / GB
        del model, contestant
        figures |= {f"{name}, s a step": statistics.median(taken) for name, taken in times.items() if taken}
        context.say({"figures": figures})
    figures["x torch"] = figures["torch, s a step"] / figures["offload, s a step"]
    return {"figures": figures, "seconds of steps": times, "says": f"{figures['x torch']:.2f} x torch"}


def profile(context: Context, placement: str) -> dict[str, Any]:
    """A step as this library sees it, and one as torch.profiler does."""
    torch.use_deterministic_algorithms(False)
    tokens = context.sizes.timed[0][1]
    contestant = Offload(new_gpt(context.sizes, context.device), context.scratch / "run", **PLACEMENTS[placement])
    data = batch(tokens, context.sizes.model[3], context.device)
    events, trace = context.scratch / "timeline.json", context.scratch / f"trace-{placement}.json.gz"
    with contextlib.closing(contestant):
        timed_steps(contestant, data, 1)
        with contestant.optimizer.timeline(events):
            timed_steps(contestant, data, 1)
        with torch.profiler.profile() as profiled:
            timed_steps(contestant, data, 1)
        stats = {name: value for name, value in contestant.optimizer.stats().items() if value is not None}
    profiled.export_chrome_trace(str(trace))
    packed = context.scratch / f"timeline-{placement}.json.gz"
    with gzip.open(packed, "wb") as file:
        file.write(events.read_bytes())
    kept = [file.name for file in (trace, packed) if file.stat().st_size <= MOST_FILE_BYTES]
    for name in kept:
        shutil.move(context.scratch / name, context.out / name)
    source = context.out / trace.name if trace.name in kept else trace
    with gzip.open(source) as opened:
        share = share_under_compute(json.load(opened)["traceEvents"])
    figures = {} if share is None else {"share of copies under compute": share}
    return {"figures": figures, "stats": stats, "says": f"of a step with {tokens} tokens: {', '.join(kept)}"}


def share_under_compute(events: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of the time of copies between host and device in which a kernel ran. None: the trace has no copies.

    Args: events: of torch.profiler's trace; `ts` and `dur` in microseconds.
    """
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel")
    copies = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "gpu_memcpy" and "DtoD" not in str(e.get("name"))
    ]
    busy: list[list[float]] = []
    for start, end in kernels:
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    total = sum(end - start for start, end in copies)
    under = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in busy)
    return under / total if total else None


def largest(context: Context, layers: int) -> dict[str, Any]:
    """Whether a model of `layers` layers trains in so much device memory, half of which is for parameters, with all
    else in RAM. Plain torch needs 20 bytes a parameter there."""
    torch.use_deterministic_algorithms(False)
    width, heads, length = context.sizes.wide
    config = GPTConfig(layers, width, heads, length)
    limit = int(context.sizes.device_gb * GB)
    model = GPT(config, device="meta", checkpoint_activations=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    ram = int(0.9 * 1024 * int(available.split()[1]))
    figures = {"parameters, 1e9": parameters / GB}
    began = time.perf_counter()
    with _allocator_limit(limit, context.device):
        contestant = Offload(
            model, context.scratch / "run", tier="cpu", param_tier="cpu", device_memory=limit // 2, cpu_memory=ram,
            device=context.device, init=_repeated_values(),
        )  # fmt: skip
        figures["s of construction"] = time.perf_counter() - began
        context.say({"figures": figures})
        torch.accelerator.reset_peak_memory_stats()
        with contextlib.closing(contestant):
            figures["s of the first step"], times = timed_steps(
                contestant, batch(2 * length, length, context.device), 2
            )
            figures["s a step"] = statistics.median(times)
            figures["GB of the device"] = torch.accelerator.max_memory_allocated() / GB
            figures["GB of RAM"] = contestant.optimizer.stats()["peak_cpu_bytes"] / GB
    says = f"{parameters / GB:.1f}e9 parameters train in {context.sizes.device_gb:g} GB of device memory"
    return {"figures": figures, "says": says}


def _repeated_values() -> Callable[[str, Tensor], None]:
    """Fills a parameter with the same normal values over and over: billions of new ones would take a minute."""
    values = torch.randn(MIB, generator=torch.Generator().manual_seed(0)) * 0.02

    @torch.no_grad()
    def fill(name: str, parameter: Tensor) -> None:
        flat = parameter.view(-1)
        for start in range(0, len(flat), MIB):
            piece = flat[start : start + MIB]
            piece.copy_(values[: len(piece)])

    return fill


@contextlib.contextmanager
def _allocator_limit(nbytes: int, device: torch.device) -> Iterator[None]:
    module = torch.get_device_module(device)
    total = torch.accelerator.get_memory_info(device)[1]
    torch.accelerator.empty_cache()
    module.set_per_process_memory_fraction(min(nbytes / total, 1.0), device)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(1.0, device)


# The worker.


def the_device() -> torch.device:
    """Raises: RuntimeError without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":
        raise RuntimeError("there is no accelerator with memory of its own")
    return torch.device(found.type, 0)


def software(device: torch.device) -> dict[str, Any]:
    """What runs here, and what of this library can be imported."""
    found: dict[str, Any] = {
        "device": str(torch.get_device_module(device).get_device_name(0)),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
    }
    if device.type == "cuda":
        found["properties"] = str(torch.cuda.get_device_properties(device))
        found["cuDNN"] = str(torch.backends.cudnn.version())
    try:
        from offload import OffloadZero, native

        found["optimizer"] = OffloadZero.__name__
        found["kernels"] = native.available_variants()[0]
        found["fallback"] = native.fallback_reason()
    except Exception as error:
        found["offload"] = first_line(error)
    return found


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def answers(device: torch.device) -> bool:
    """Whether the device still works. After some errors it does not, for the rest of the process."""
    try:
        return torch.ones(8, device=device).add_(1).sum().item() == 16
    except RuntimeError:
        return False


def result_of(context: Context, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a case. Returns: its result, with "answers": whether this process can go on."""
    context.scratch.mkdir(parents=True, exist_ok=True)
    try:
        found: dict[str, Any] = {"status": "ok", **globals()[function](context, **arguments)}
    except SkippedError as error:
        found = {"status": "skipped", "says": str(error)}
    except Exception as error:
        found = {"status": "failed", "says": first_line(error), "traceback": traceback.format_exc()[-LAST_CHARACTERS:]}
    is_small = function == "toy"
    gc.collect()
    found["answers"] = (found["status"] in ("ok", "skipped") or is_small) and answers(context.device)
    if found["answers"]:
        torch.accelerator.empty_cache()
    shutil.rmtree(context.scratch, ignore_errors=True)
    return found


def sayable(value: Any) -> Any:
    """JSON has no NaN and no infinity: a figure that is one is a word."""
    if isinstance(value, Mapping):
        return {name: sayable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [sayable(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def run(options: Options) -> None:
    """What bench/gpu.py asks of another process of its own: a worker, a single case, or pictures."""
    if options.draw:
        draw(options.out)
        return
    assert options.scratch is not None
    # What libraries print must not come between the answers.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(values: Mapping[str, Any]) -> None:
        print(json.dumps(sayable(values), allow_nan=False, default=str), file=channel, flush=True)

    device = the_device()
    torch.zeros(1, device=device)
    program = [sys.executable, str(Path(sys.argv[0]).resolve()), str(options.out), "--scratch", str(options.scratch)]
    program += ["--tiny"] if options.tiny else []
    sizes = TINY if options.tiny else FULL
    folder = options.scratch / f"case-{os.getpid()}"
    context = Context(device, sizes, folder, options.out, program, say)
    if options.one:
        [case] = [one for one in cases(options.tiny) if one.name == options.one]
        assert case.function is not None
        say(result_of(context, case.function, case.arguments))
        return
    assert options.threads_log is not None
    with open(options.threads_log, "w") as threads:
        faulthandler.enable(threads)
        say(software(device))
        for line in sys.stdin:
            order = json.loads(line)
            threads.seek(0)
            threads.truncate()
            faulthandler.dump_traceback_later(min(THREADS_AFTER_S, 0.8 * order["limit_s"]), file=threads)
            found = result_of(context, order["function"], order["arguments"])
            faulthandler.cancel_dump_traceback_later()
            say(found)


# Pictures.


def draw(out: Path) -> None:
    """Draws tokens per second as a share of plain torch's, and the timeline of a step that was recorded."""
    from offload.cli.plots import new_figure
    from offload.cli.timeline_plot import timeline_picture

    found = json.loads((out / "results.json").read_text())["cases"]
    shares: dict[str, list[tuple[int, float]]] = {}
    for name, one in found.items():
        if name.startswith("train-") and "x torch" in one.get("figures", {}):
            placement, _, tokens = name.removeprefix("train-").rpartition("-")
            shares.setdefault(placement, []).append((int(tokens), one["figures"]["x torch"]))
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    for placement, points in shares.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=placement)
    axes.set(xscale="log", xlabel="tokens a step", ylabel="tokens/s, x plain torch", ylim=(0, None))
    if shares:
        axes.legend()
        figure.savefig(out / "training.png")
    packed = out / "timeline-streamed-cpu.json.gz"
    if packed.exists():
        events = out / ".timeline.json"
        events.write_bytes(gzip.decompress(packed.read_bytes()))
        try:
            timeline_picture(events, out / "timeline.png", "parameters stream; one step and the one before it")
        finally:
            events.unlink()
