"""Everything that needs a GPU: `make gpu OUT=DIR` (`MINUTES=8` a call). Call it again until no case is left.

Cases run in order, each in a process of its own, without network, and write DIR/<case>.json as they end. A case whose
file is there is not run again. At the end of a call DIR has a page, README.md, and pictures of what there is.

The tests on the device come first, then the link to host memory, whole training steps of a GPT beside plain torch's,
the largest model that trains in a given amount of device memory, and a timeline with a trace of torch.profiler. With
`--tiny` all sizes are small: a test runs it so on the simulated accelerator (`OFFLOAD_TEST_DEVICE=simulated`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import parameters
from bench.report import Report, Table, note, run, scratch
from offload import OffloadZero
from offload.cli.plots import new_figure
from offload.cli.timeline_plot import timeline_picture
from offload.devices.copies import accelerator, copier_for
from offload.models.gpt import GPT, GPTConfig, initial_values
from offload.sizes import MIB
from offload.storage.arena import Arena
from tests.support import accelerator as simulated

ROOT = Path(__file__).parents[1]
GB = 10**9
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {"tier": "device"},
    "states on cpu": {"tier": "cpu"},
    "states on nvme": {"tier": "nvme"},
    "parameters from cpu": {"tier": "cpu", "param_tier": "cpu"},
    "parameters from nvme": {"tier": "nvme", "param_tier": "nvme"},
}
PARITY = ("same_bits", "streaming", "not_blocking", "resumed", "loss_scale", "stored_gradients")
SANITIZED = "tests/gpu/test_training.py::test_a_step_moves_two_bytes_a_parameter_each_way"
"""Under torch's CUDA sanitizer, which finds uses of memory by two streams that nobody ordered."""
SHORTEST_S = 20
"""A case is not begun with less time than this."""
ABOUT = """\
- **GB/s**: 1e9 bytes a second between pinned host memory and the device; *both*: each direction, beside the other.
- **tokens/s**: median over the steps of all rounds; **x torch**: by that of plain torch AdamW with resident fp32
  masters in the same run, which takes turns with it.
- **peak device**: the most that torch's allocator had lent; **pinned**: page-locked host memory of offload."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured. Attributes: tokens: of a step; seq: tokens of a sequence; layers: of the models that
    are tried; in_gb: the device memory that they are tried in."""

    model: GPTConfig
    tokens: Sequence[int]
    placements: Sequence[str]
    steps: int
    rounds: int
    copy_bytes: int
    wide: GPTConfig
    layers: Sequence[int]
    in_gb: Sequence[float]


FULL = Sizes(
    GPTConfig(layers=20, width=2048, heads=16), (4096, 16384, 65536), tuple(PLACEMENTS), 4, 2, 512 * MIB,
    GPTConfig(layers=1, width=4096, heads=32), (8, 16, 32, 64, 128, 256), (10, 24),
)  # fmt: skip
TINY = Sizes(
    GPTConfig(layers=3, width=32, heads=2, context=16), (32,), ("states on cpu", "parameters from nvme"), 2, 1, 1 * MIB,
    GPTConfig(layers=1, width=64, heads=2, context=16), (2,), (0.1,),
)  # fmt: skip


# The driver.


@dataclass(frozen=True)
class Case:
    """A process to run. The result is its last line of output if it `measures`, else its exit status."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    measures: bool

    def result(self, limit_s: float) -> dict[str, Any] | None:
        """Runs the process, and returns the result; None if it ran past the limit."""
        began = time.monotonic()
        try:
            done = subprocess.run(
                self.command,
                cwd=ROOT,
                env=os.environ | self.environment,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return None
        found: dict[str, Any] = {"case": self.name, "seconds": time.monotonic() - began, "exit_code": done.returncode}
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if self.measures and not done.returncode:
            return {**found, **json.loads(last)}
        return found | {"says": last, "errors": "" if not done.returncode else (done.stdout + done.stderr)[-4000:]}


def cases(out: Path, tiny: bool) -> Iterator[Case]:
    """All of them, in order."""
    sizes = TINY if tiny else FULL
    device = os.environ.get("OFFLOAD_TEST_DEVICE", "cuda")
    chosen = "not peers and not oracle and not slow"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen]
    suites = {"sanitizer": [SANITIZED]}
    if not tiny:
        suites |= {name: [f"tests/gpu/test_{name}.py"] for name in ("training", "ranks")}
        suites |= {name: [f"tests/parity/test_{name}.py"] for name in PARITY}
    for name, files in suites.items():
        environment = {"OFFLOAD_TEST_DEVICE": device}
        if name == "sanitizer" and device == "cuda":
            environment["TORCH_CUDA_SANITIZER"] = "1"
        yield Case(f"tests-{name}", [*pytest, *files], environment, measures=False)
    measured = ["link"]
    measured += [f"train-{tokens}-{placement}" for placement in sizes.placements for tokens in sizes.tokens]
    measured += [f"largest-{limit:g}-{layers}" for limit in sizes.in_gb for layers in sizes.layers]
    for name in (*measured, "timeline"):
        command = [sys.executable, __file__, str(out), "--case", name, *(["--tiny"] if tiny else [])]
        yield Case(name.replace(" ", "-"), command, {}, measures=True)


def go_on(out: Path, minutes: float, tiny: bool) -> int:
    """Runs cases until the time is over; returns how many are left."""
    end = time.monotonic() + 60 * minutes
    left = [case for case in cases(out, tiny) if not (out / f"{case.name}.json").exists()]
    for number, case in enumerate(left):
        limit_s = end - time.monotonic()
        if limit_s < min(SHORTEST_S, 30 * minutes):
            return len(left) - number
        if skipped := _is_too_large(out, case.name):
            _write(out / f"{case.name}.json", {"case": case.name, "failed": skipped})
            continue
        note(f"{case.name} ...")
        result = case.result(limit_s)
        if result is None:
            if number:
                return len(left) - number  # it may have all of the next call
            result = {"case": case.name, "failed": f"not finished in {minutes:g} minutes"}
        _write(out / f"{case.name}.json", result)
    return 0


def _is_too_large(out: Path, name: str) -> str:
    """Why a model need not be tried: a smaller one failed. Empty if it has to be tried."""
    kind, _, rest = name.partition("-")
    if kind == "largest":
        for file in out.glob(f"largest-{rest.rpartition('-')[0]}-*.json"):
            found = json.loads(file.read_text())
            if "failed" in found:
                return f"a smaller one failed: {found['failed']}"
    return ""


def _write(file: Path, result: Mapping[str, Any]) -> None:
    temporary = file.with_suffix(".partial")
    temporary.write_text(json.dumps(result, indent=1, allow_nan=False))
    os.replace(temporary, file)


# Measuring.


def the_device() -> torch.device:
    """Raises: SystemExit without one."""
    if simulated.is_wanted():
        simulated.load()
    found = accelerator()
    if found is None:
        sys.exit("there is no accelerator")
    return torch.device(found.type, 0)


def link(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """GB/s in each direction alone and with the other, from the arena and from torch's own pinned memory."""
    copier = copier_for(device)
    nbytes, speeds = sizes.copy_bytes, {}
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    arena = Arena(2 * nbytes, copier)
    own = [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    with closing(arena):
        for name, here in (("arena", [arena.carve(nbytes) for _ in range(2)]), ("torch", own)):
            for direction in ("up", "down", "both"):
                times = []
                for _ in range(1 + 3 * sizes.rounds):
                    torch.accelerator.synchronize()
                    began = time.perf_counter()
                    copies = [copier.to_device(here[0], there[0])] if direction != "down" else []
                    copies += [copier.to_host(there[1], here[1])] if direction != "up" else []
                    for copy in copies:
                        copy.wait()
                    times.append(time.perf_counter() - began)
                speeds[f"{name}, {direction}"] = [nbytes / GB / seconds for seconds in times[1:]]
    return {"gb_per_s": speeds}


class Contestant(ABC):
    """A model on the device and its optimizer."""

    model: nn.Module

    @abstractmethod
    def step(self) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Gives its memory back."""

    def pinned_bytes(self) -> int:
        return 0


class Torch(Contestant):
    """Plain AdamW on resident fp32 masters; the model computes in bf16."""

    def __init__(self, model: nn.Module) -> None:
        self.masters = [param.detach().float().clone().requires_grad_() for param in model.parameters()]
        self.model = model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4)

    def step(self) -> None:
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)
                param.grad = master.grad = None


class Offload(Contestant):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.optimizer = OffloadZero(model, optimizer, commit_every=None, **options)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()

    def pinned_bytes(self) -> int:
        return int(self.optimizer.stats()["peak_cpu_bytes"])


def new_gpt(config: GPTConfig, device: torch.device) -> GPT:
    torch.manual_seed(0)
    model = GPT(config, device="meta", checkpoint_activations=True).to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02)
    return model


def batch(config: GPTConfig, tokens: int, device: torch.device) -> Tensor:
    return torch.arange(tokens, device=device).mul(31).remainder(251).view(-1, config.context)


def train_steps(contestant: Contestant, data: Tensor, steps: int) -> list[float]:
    """Seconds of each step, after one that is not timed."""
    times = []
    for _ in range(1 + steps):
        began = time.perf_counter()
        contestant.model(data, data)[1].backward()
        contestant.step()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    return times[1:]


def train(sizes: Sizes, device: torch.device, folder: Path, tokens: int, placement: str) -> dict[str, Any]:
    """Tokens per second and peak memory of plain torch and of a placement, which run in turns."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(sizes.rounds):
        for name in ("torch", placement):
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
            model = new_gpt(sizes.model, device)
            options = dict(PLACEMENTS.get(name, {}))
            if options.get("tier") == "nvme":
                options["path"] = folder / f"run{number}"
            contestant = Torch(model) if name == "torch" else Offload(model, **options)
            torch.accelerator.reset_peak_memory_stats()
            with closing(contestant):
                times = train_steps(contestant, batch(sizes.model, tokens, device), sizes.steps)
                one = found.setdefault(name, {"tokens_per_s": []})
                one["tokens_per_s"] += [tokens / seconds for seconds in times]
                one["peak_device_bytes"] = torch.accelerator.max_memory_allocated()
                one["pinned_bytes"] = contestant.pinned_bytes()
            del model, contestant
    return {"tokens": tokens, "placement": placement, "parameters": parameters(sizes.model), "contestants": found}


def largest(sizes: Sizes, device: torch.device, folder: Path, limit_gb: float, layers: int) -> dict[str, Any]:
    """Whether a model of `layers` layers trains in `limit_gb` of device memory, half of which is for parameters."""
    config = GPTConfig(layers, sizes.wide.width, sizes.wide.heads, sizes.wide.context)
    limit = int(limit_gb * GB)
    found: dict[str, Any] = {"limit_bytes": limit, "layers": layers, "parameters": parameters(config)}
    with _allocator_limit(limit, device):
        model = GPT(config, device="meta", checkpoint_activations=True)
        try:
            contestant = Offload(
                model, tier="nvme", param_tier="nvme", grad_tier="nvme", path=folder / "run", device_memory=limit // 2,
                device=device, init=initial_values(config, 0),
            )  # fmt: skip
            with closing(contestant):
                times = train_steps(contestant, batch(config, 2 * config.context, device), 2)
                found["peak_device_bytes"] = torch.accelerator.max_memory_allocated()
        except (RuntimeError, OSError, ValueError) as error:  # out of memory, of the disk, or of the budget
            return found | {"failed": f"{type(error).__name__}: {error}"}
    return found | {"step_s": statistics.median(times)}


@contextmanager
def _allocator_limit(nbytes: int, device: torch.device) -> Iterator[None]:
    if device.type == simulated.NAME:
        with simulated.memory_limit(nbytes):
            yield
        return
    total = torch.accelerator.get_memory_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0), device)
    yield


def timeline(sizes: Sizes, device: torch.device, out: Path, folder: Path) -> dict[str, Any]:
    """Records a few steps of streamed parameters, as this library and as torch.profiler see them."""
    placement = sizes.placements[-2] if len(sizes.placements) > 2 else sizes.placements[-1]
    options = dict(PLACEMENTS[placement])
    if options["tier"] == "nvme":
        options["path"] = folder / "run"
    contestant = Offload(new_gpt(sizes.model, device), **options)
    data = batch(sizes.model, sizes.tokens[0], device)
    with closing(contestant):
        train_steps(contestant, data, 1)
        with contestant.optimizer.timeline(out / "timeline-events.json"):
            train_steps(contestant, data, 1)
        with torch.profiler.profile() as profile:
            train_steps(contestant, data, 1)
    profile.export_chrome_trace(str(out / "trace.json"))
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    return {"placement": placement, "tokens": sizes.tokens[0], "copies_under_compute": share_under_compute(events)}


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


def measure(out: Path, name: str, tiny: bool) -> dict[str, Any]:
    """Runs one case in this process."""
    sizes, device = TINY if tiny else FULL, the_device()
    kind, _, rest = name.partition("-")
    with scratch(out) as folder:
        if kind == "link":
            return link(sizes, device)
        if kind == "timeline":
            return timeline(sizes, device, out, folder)
        first, _, second = rest.partition("-")
        if kind == "train":
            return train(sizes, device, folder, int(first), second)
        return largest(sizes, device, folder, float(first), int(second))


# The page.


def report(out: Path, tiny: bool) -> Report:
    """The report of all cases that have ended."""
    found = []
    for case in cases(out, tiny):
        file = out / f"{case.name}.json"
        if file.exists():
            found.append(json.loads(file.read_text()))
    tests = [one for one in found if "says" in one and "contestants" not in one]
    tables = [
        Table(
            ("case", "s", "result"),
            [(t["case"], f"{t['seconds']:.0f}", t["says"][:100]) for t in tests],
            "Cases that only end",
        )
    ]
    speeds = [
        (name, f"{statistics.median(values):.1f}") for one in found for name, values in one.get("gb_per_s", {}).items()
    ]
    tables.append(Table(("from", "GB/s"), speeds, "Link"))
    trained = [one for one in found if "contestants" in one]
    rows = [row for one in trained for row in _rows(one)]
    tables.append(
        Table(("placement", "tokens", "tokens/s", "x torch", "peak device GB", "pinned GB"), rows, "Training")
    )
    fits = []
    for one in found:
        if "limit_bytes" in one:
            ended = one.get("failed", f"{one.get('step_s', 0):.1f} s a step")[:80]
            fits.append((f"{one['limit_bytes'] / GB:g}", f"{one['parameters'] / GB:.1f}", ended))
    tables.append(Table(("GB", "1e9 parameters", "two steps"), fits, "What trains in so much device memory"))
    remarks = [f"{one['case']}: {one['failed']}" for one in found if "failed" in one]
    remarks += [f"{one['case']} ended with exit code {one['exit_code']}" for one in found if one.get("exit_code")]
    shares = [one["copies_under_compute"] for one in found if one.get("copies_under_compute") is not None]
    remarks += [f"of the time of copies, {share:.0%} is under compute" for share in shares]
    pictures: dict[str, Callable[[Path], None]] = {}
    if trained:
        pictures["training.png"] = lambda file: _draw(trained, file)
    if (out / "timeline-events.json").exists():
        pictures["timeline.png"] = lambda file: timeline_picture(
            out / "timeline-events.json", file, "parameters stream; one step and the one before it"
        )
    device = str(torch.get_device_module(the_device()).get_device_name(0))
    return Report("gpu", "On a GPU", ABOUT, tables, {"cases": found}, remarks, setup=device, pictures=pictures)


def _rows(one: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    medians = {name: statistics.median(found["tokens_per_s"]) for name, found in one["contestants"].items()}
    for name, found in one["contestants"].items():
        title = name if name != "torch" else f"torch, beside {one['placement']}"
        speed, share = f"{medians[name]:,.0f}", f"{medians[name] / medians['torch']:.2f}"
        peak, pinned = f"{found['peak_device_bytes'] / GB:.2f}", f"{found['pinned_bytes'] / GB:.2f}"
        yield title, f"{one['tokens']:,}", speed, share, peak, pinned


def _draw(trained: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draws tokens per second as a share of plain torch's."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    placements = list(dict.fromkeys(one["placement"] for one in trained))
    for placement in placements:
        ones = [one for one in trained if one["placement"] == placement]
        shares = [
            statistics.median(one["contestants"][placement]["tokens_per_s"])
            / statistics.median(one["contestants"]["torch"]["tokens_per_s"])
            for one in ones
        ]
        axes.plot([one["tokens"] for one in ones], shares, marker="o", label=placement)
    axes.set(xscale="log", xlabel="tokens a step", ylabel="tokens/s, x plain torch", ylim=(0, None))
    axes.legend()
    figure.savefig(file)


def main(
    out: Annotated[Path, typer.Argument(help="Folder of results; also of swap files meanwhile.")],
    minutes: Annotated[
        float, typer.Option(help="After so long no case is begun, and the one that runs is stopped.")
    ] = 8,
    case: Annotated[str, typer.Option(help="Run this one in this process, and print its result.")] = "",
    tiny: Annotated[bool, typer.Option(help="Small sizes.")] = False,
) -> None:
    """Runs what is left of everything that needs a GPU."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if case:
        print(json.dumps(measure(out, case, tiny), allow_nan=False))
        return
    the_device()
    left = go_on(out, minutes, tiny)
    made = report(out, tiny)
    made.publish(out=out)
    (out / "README.md").write_text(made.page())
    _write(out / "results.json", made.data)
    note(f"{left} cases are left: call again" if left else "all cases have run")


if __name__ == "__main__":
    run(main)
