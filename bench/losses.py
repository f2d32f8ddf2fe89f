"""The loss with small states, beside fp32's and peers': `python bench/losses.py run --out DIR`, then `report DIR`.

`run` trains a model several times: with fp32, "8bit" and "bf16" states of this library, with bitsandbytes' and
torchao's AdamW8bit, and with torch's AdamW. It needs no network, and of Python what this library imports. Peers are
imported only where they are asked for; a missing one is named, and costs no other run. `--jobs` runs share the device,
each in a process. What has ended is in DIR/results.json, and the next call goes on with what is left.

`report` draws from that file, and writes DIR/report.md and two pictures a model.

[Note: the same training]
Runs of a seed have the same initial values, batches, learning rates and held-out text. All train a bf16 model with
fp32 masters, taken from the values before the cast; gradients are bf16. Their norm is clipped to 1, their learning rate
warms up and falls by a cosine, betas and eps are torch's defaults, and all parameters have a weight decay of
WEIGHT_DECAY. This library has its masters itself. For the others they are kept here, as one writes it by hand: what the
optimizer steps are fp32 copies of the parameters. They get the bf16 gradients, widened; are clipped by torch's
function; and are copied into the model after the step. So peers round their moments and nothing else. They have their
own defaults: parameters below 4,096 elements have fp32 moments; blocks are of 256. bitsandbytes advises 32 bits for
embeddings: that takes a call for each, or a layer of its own, and is not the default. torchao's step is compiled, as it
is meant to be, on a CPU with a compiler: eager it takes longer than all the rest. On a GPU it is eager.

[Note: the words]
"vocabulary" has a token for each of the WORDS - 1 most frequent words of the text, and one for the others: an embedding
and an output of WORDS rows, of which a batch uses few. Its gradient is dense in memory, as AdamW needs it; rows whose
words are not in the batch have a gradient of 0.

[Note: an update]
What is recorded of some steps is |update| / lr of each element, without weight decay, from the masters before and
after: sqrt(1 - beta2) of it or less is usual, and about 1 in the first steps. Where a run blows up, it is much more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from bench.gpu import end_with_parent
from offload.cli.plots import MISSING, can_draw, new_figure
from offload.demo.gpt import GPT, GPTConfig, initial_values
from offload.demo.loop import lr_factor
from offload.demo.text import even_starts, load_text, split
from offload.native import cpu_model
from offload.native.memory import return_freed

BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.999), 1e-8, 0.1, 1.0
WORDS = 50_000
VALIDATIONS = 20
"""In a run of at least ten times as many steps, beside the one before its first step."""
HELD_OUT_WINDOWS, VALIDATED_TOGETHER = 128, 4096
"""Of the held-out text, and tokens of them at a time."""
RECORDED = (0.01, 0.05, 0.25, 0.5, 1.0)
"""Parts of a run at whose end an update is recorded."""
EDGES = [10 ** (exponent / 8) for exponent in range(-6 * 8, 6 * 8 + 1)]
"""Of the histograms of updates, in learning rates. What is below or above counts in the first or last bin."""
RESULTS = "results.json"


@dataclass(frozen=True)
class Setup:
    """Attributes: config: sizes; words: rows of the embedding and the output, 256 for bytes; lr: at its peak."""

    config: GPTConfig
    words: int
    lr: float


MODELS = {
    "small": Setup(GPTConfig(layers=6, width=256, heads=4, context=256), 256, 1e-3),
    "vocabulary": Setup(GPTConfig(layers=2, width=128, heads=4, context=256), WORDS, 1e-3),
    "mini": Setup(GPTConfig(layers=2, width=128, heads=4, context=128), 256, 1e-3),
    "46m": Setup(GPTConfig(layers=6, width=800, heads=10, context=256), 256, 6e-4),
    "tiny": Setup(GPTConfig(layers=1, width=64, heads=2, context=32), 256, 1e-3),
}
OURS = ("fp32", "bf16", "8bit")
PEERS = ("bitsandbytes", "torchao")
COLORS = {
    "fp32": "black",
    "bf16": "tab:blue",
    "8bit": "tab:red",
    "torch": "tab:gray",
    "bitsandbytes": "tab:orange",
    "torchao": "tab:green",
}
"""By states, in the order of tables and pictures."""
LABELS = {
    "fp32": '"fp32"',
    "bf16": '"bf16"',
    "8bit": '"8bit"',
    "torch": "torch's AdamW",
    "bitsandbytes": "bitsandbytes' AdamW8bit",
    "torchao": "torchao's AdamW8bit",
}


@dataclass(frozen=True)
class Spec:
    """A run. Attributes: text: a digest of its tokens; seq: tokens of a window; device: "cpu" or "cuda"."""

    model: str
    states: str
    seed: int
    steps: int
    batch: int
    seq: int
    device: str
    text: str

    @property
    def setup(self) -> Setup:
        return MODELS[self.model]

    @property
    def name(self) -> str:
        return f"{self.model}, {self.states}, seed {self.seed}"


# --- The trainings.


class Trainer(ABC):
    """A bf16 model with fp32 masters, and its optimizer; see [Note: the same training].

    Attributes: model; optimizer.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self) -> None:
        """Clips the gradients, updates the parameters, and drops the gradients."""

    @abstractmethod
    def masters(self) -> list[Tensor]:
        """Copies of the masters in RAM, fp32."""

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def close(self) -> None:  # noqa: B027
        """Gives back what it holds."""


class Offload(Trainer):
    """This library, with states where the model is."""

    def __init__(self, model: nn.Module, states: str, lr: float) -> None:
        from offload import OffloadZero

        adamw = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        device = next(model.parameters()).device.type
        tier = "cpu" if device == "cpu" else "device"
        self._zero = OffloadZero(model, adamw, tier=tier, states=states)
        self.model, self.optimizer = model, self._zero

    def step(self) -> None:
        self._zero.clip_grad_norm_(CLIP)
        self._zero.step()
        self._zero.zero_grad()

    def masters(self) -> list[Tensor]:
        return [self._zero.state_of(param)["master"].clone() for param in self.model.parameters()]

    def close(self) -> None:
        self._zero.close()


class ByHand(Trainer):
    """fp32 masters beside a bf16 model, stepped by an optimizer. Args: make: makes it of masters."""

    def __init__(self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], lr: float) -> None:
        self._masters: list[Tensor] = [param.detach().clone().requires_grad_() for param in model.parameters()]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self.model = model.bfloat16()
        self._params: list[Tensor] = list(model.parameters())
        self.optimizer = make(self._masters, lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(_grads(self._masters), _grads(self._params))
        nn.utils.clip_grad_norm_(self._masters, CLIP)
        self.optimizer.step()
        torch._foreach_copy_(self._params, self._masters)
        for param in self._params:
            param.grad = None

    def masters(self) -> list[Tensor]:
        return [master.detach().to("cpu", copy=True) for master in self._masters]


def _grads(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def trainer(states: str, model: nn.Module, lr: float) -> Trainer:
    """Raises: ImportError: a peer is not installed."""
    if states in OURS:
        return Offload(model, states, lr)
    if states == "torch":
        return ByHand(model, torch.optim.AdamW, lr)
    module = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}[states]
    if states == "torchao" and (next(model.parameters()).is_cuda or shutil.which("c++") is None):
        torch.compiler.set_stance("force_eager")
    return ByHand(model, importlib.import_module(module).AdamW8bit, lr)


def build(setup: Setup, seed: int) -> nn.Module:
    """The model in fp32, on the CPU."""
    model = GPT(setup.config, seed)
    if setup.words != model.head.out_features:
        width = setup.config.width
        fill = initial_values(setup.config, seed)
        model.embed = nn.Embedding(setup.words, width)
        model.head = nn.Linear(width, setup.words, bias=False)
        fill("embed.weight", model.embed.weight)
        fill("head.weight", model.head.weight)
    return model


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean cross entropy in nats a token. Args: windows: tokens and the one after them, (n, seq + 1) integers."""
    logits, _ = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train(spec: Spec, tokens: npt.NDArray[np.int32], on_validation: Callable[[int, float], None]) -> dict[str, Any]:
    """Trains a model from its first step to its last.

    Args:
        spec: the run.
        tokens: the text, (n,).
        on_validation: gets how many steps are done, and the held-out loss.

    Returns:
        losses: of each step's batch, before its update; held_out: pairs of how many steps were done and the loss;
        updates: see [Note: an update]; seconds: all of it. A loss that is not finite is None.
    """
    began = time.monotonic()
    setup, device = spec.setup, torch.device(spec.device)
    to_train, held_out = (torch.from_numpy(part.copy()).to(device) for part in split_tokens(tokens))
    ahead = torch.arange(spec.seq + 1, device=device)
    generator = torch.Generator().manual_seed(spec.seed)
    starts = torch.randint(len(to_train) - spec.seq, (spec.steps, spec.batch), generator=generator).to(device)
    spread = torch.tensor(even_starts(split_tokens(tokens)[1], HELD_OUT_WINDOWS, spec.seq), device=device)
    validation = held_out[spread[:, None] + ahead].long().split(max(1, VALIDATED_TOGETHER // spec.seq))
    run = trainer(spec.states, build(setup, spec.seed).to(device), setup.lr)
    recorded = {max(1, round(part * spec.steps)) for part in RECORDED}
    validations = max(1, min(VALIDATIONS, spec.steps // 10))
    validated = {round(part * spec.steps / validations) for part in range(1, validations + 1)}
    losses: list[Tensor] = []
    points: list[tuple[int, float | None]] = []
    updates: list[dict[str, Any]] = []

    def validate(done: int) -> None:
        with torch.no_grad():
            sums = [loss_of(run.model, windows).double() * len(windows) for windows in validation]
        loss = float(torch.stack(sums).sum()) / len(spread)
        points.append((done, finite(loss)))
        return_freed()  # bitsandbytes' step on a CPU scatters malloc's heap: by 10 MB a step with the words
        on_validation(done, loss)

    try:
        validate(0)
        for step in range(1, spec.steps + 1):
            lr = setup.lr * lr_factor(step - 1, spec.steps)
            run.set_lr(lr)
            loss = loss_of(run.model, to_train[starts[step - 1][:, None] + ahead].long())
            loss.backward()
            losses.append(loss.detach())
            before = run.masters() if step in recorded else []
            run.step()
            if step in recorded:
                updates.append({"step": step, **distribution(before, run.masters(), lr)})
            if step in validated:
                validate(step)
    finally:
        run.close()
    curve = [finite(loss) for loss in torch.stack(losses).tolist()]
    return {"losses": curve, "held_out": points, "updates": updates, "seconds": time.monotonic() - began}


def finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def distribution(before: Sequence[Tensor], after: Sequence[Tensor], lr: float) -> dict[str, Any]:
    """See [Note: an update].

    Returns:
        counts: of EDGES' bins; zeros: how many are exactly 0, in no bin; not_finite; rms and max of the others.
    """
    counts = np.zeros(len(EDGES) - 1, dtype=np.int64)
    zeros = wrong = total = 0
    square, largest = 0.0, 0.0
    for old, new in zip(before, after, strict=True):
        # What an fp32 product rounds is below 1e-7 of the master, and no update where there was none.
        decayed = old.mul(1 - lr * WEIGHT_DECAY)
        sizes = ((new - decayed).abs() / lr).flatten().double().numpy()
        good = sizes[np.isfinite(sizes)]
        positive = good[good > 0]
        wrong += len(sizes) - len(good)
        zeros += len(good) - len(positive)
        total += len(good)
        square += float(positive @ positive)
        largest = max(largest, float(positive.max(initial=0.0)))
        counts += np.histogram(positive.clip(EDGES[0], EDGES[-1]), bins=EDGES)[0]
    rms = math.sqrt(square / max(1, total))
    return {"counts": counts.tolist(), "zeros": zeros, "not_finite": wrong, "rms": rms, "max": largest}


# --- The text.


def split_tokens(tokens: npt.NDArray[np.int32]) -> tuple[Any, Any]:
    """What is trained on, and the held-out end."""
    return split(tokens)  # type: ignore[arg-type]


def byte_tokens() -> npt.NDArray[np.int32]:
    """The sources of Python's standard library."""
    text = load_text(None, 256)
    return np.concatenate([text.train, text.validation]).astype(np.int32)


def word_tokens() -> npt.NDArray[np.int32]:
    """The same in words, of which the training part has the most frequent ones; see [Note: the words]."""
    words = re.findall(rb"\w+|\s+|[^\w\s]", byte_tokens().astype(np.uint8).tobytes())
    to_train = words[: len(words) - int(len(words) * 0.05)]
    frequent = Counter(to_train).most_common(WORDS - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, start=1)}
    return np.array([numbers.get(word, 0) for word in words], dtype=np.int32)


# --- Processes. One trains one run after the other, as it is told on stdin.


def work() -> None:
    """Trains what is asked on stdin, a JSON object a line, and answers each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        spec = Spec(**order["spec"])

        def said(done: int, loss: float, spec: Spec = spec) -> None:
            print(f"{spec.name}: step {done}, held-out loss {loss:.4f}", file=sys.stderr, flush=True)

        tokens = np.load(order["tokens"])
        try:
            answer: dict[str, Any] = {
                "run": {"spec": asdict(spec), "software": software(spec), **train(spec, tokens, said)}
            }
        except Exception as error:  # whatever it is, other runs go on
            answer = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer, allow_nan=False), file=answers, flush=True)


def software(spec: Spec) -> dict[str, str]:
    """Versions, and the device."""
    name, _ = cpu_model()
    if spec.device != "cpu":
        name = torch.cuda.get_device_name()
    versions = {"device": name, "torch": torch.__version__, "Python": platform.python_version()}
    if spec.states in PEERS:
        versions[spec.states] = metadata.version(spec.states)
    return versions


class Worker:
    """A process that trains. Args: threads: of the CPU, that torch computes on in it."""

    def __init__(self, threads: int) -> None:
        environment = {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "work"],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )

    def run(self, spec: Spec, tokens: Path) -> dict[str, Any]:
        """Returns: what `work` answers; "failed" also where it ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"spec": asdict(spec), "tokens": str(tokens)}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": "its process ended"}
        return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Called when no thread waits for it."""
        with self._process:
            self._process.kill()


class Results:
    """What has ended, in a file that is always whole. Threads may use it at once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": [], "failures": {}}

    def missing(self, specs: Iterable[Spec]) -> list[Spec]:
        done = [run["spec"] for run in self.data["runs"]]
        return [spec for spec in specs if asdict(spec) not in done]

    def seconds(self, spec: Spec) -> float:
        """How long the longest run like this one took, of any seed; 0 where there was none."""
        wanted = asdict(spec) | {"seed": None}
        return max((one["seconds"] for one in self.data["runs"] if one["spec"] | {"seed": None} == wanted), default=0)

    def add(self, spec: Spec, answer: dict[str, Any]) -> None:
        with self._lock:
            if "run" in answer:
                self.data["runs"].append(answer["run"])
                self.data["failures"].pop(spec.name, None)
            else:
                self.data["failures"][spec.name] = answer["failed"]
            aside = self._file.with_suffix(".new")
            aside.write_text(json.dumps(self.data, allow_nan=False))
            aside.replace(self._file)


def train_all(specs: Sequence[Spec], files: Mapping[str, Path], results: Results, jobs: int, minutes: float) -> int:
    """Trains all that is left, `jobs` runs at once. Returns: how many runs are left."""
    end = time.monotonic() + 60 * minutes
    left = queue.SimpleQueue[Spec]()
    for spec in specs:
        left.put(spec)
    workers: dict[int, Worker] = {}
    stopped = threading.Event()

    def serve(number: int) -> None:
        while not (stopped.is_set() or left.empty()):
            with contextlib.suppress(queue.Empty):  # another thread was faster
                serve_one(number, left.get_nowait())

    def serve_one(number: int, spec: Spec) -> None:
        if time.monotonic() + results.seconds(spec) > end:
            print(f"{spec.name}: not begun, it would take {results.seconds(spec):.0f} s", flush=True)
            return
        if number not in workers:
            workers[number] = Worker(max(1, (os.cpu_count() or 1) // jobs))
        answer = workers[number].run(spec, files[spec.model])
        if stopped.is_set():
            return
        results.add(spec, answer)
        if "failed" in answer:
            print(f"{spec.name}: {answer['failed'].splitlines()[0]}", flush=True)
            workers.pop(number).close()  # its device may be lost
        else:
            print(f"{spec.name}: {answer['run']['seconds']:.0f} s", flush=True)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    finally:
        stopped.set()
        for worker in list(workers.values()):
            worker.kill()
        for thread in threads:
            thread.join()
        for worker in workers.values():
            worker.close()
    return len(results.missing(specs))


def run(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    for peer in [name for name in PEERS if name in options.states and find_spec(name) is None]:
        print(f"{peer} is not installed, and is left out", flush=True)
        options.states.remove(peer)
    results = Results(options.out / RESULTS)
    with tempfile.TemporaryDirectory() as scratch:
        files, digests = {}, {}
        for name in options.model:
            tokens = byte_tokens() if MODELS[name].words == 256 else word_tokens()
            files[name], digests[name] = Path(scratch, f"{name}.npy"), xxhash.xxh64_hexdigest(tokens.tobytes())
            np.save(files[name], tokens)
        specs = [
            Spec(name, states, seed, options.steps, options.batch, options.seq, options.device, digests[name])
            for name in options.model
            for seed in range(options.seeds)
            for states in options.states
        ]
        left = results.missing(specs)
        print(f"{len(specs) - len(left)} of {len(specs)} runs have ended before", flush=True)
        spent = (time.monotonic() - began) / 60
        remaining = train_all(left, files, results, options.jobs, options.minutes - spent)
    print(f"{remaining} runs are left: call again" if remaining else "all runs have ended")


# --- The report.


def smoothed(curve: Sequence[float | None], width: int) -> npt.NDArray[np.float64]:
    """Means of up to `width` values, the last one at the value's own place."""
    values = np.array([math.nan if value is None else value for value in curve])
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    firsts = np.maximum(0, ends - width)
    return np.asarray((sums[ends] - sums[firsts]) / (ends - firsts))


@dataclass(frozen=True)
class Group:
    """Runs of one model that can be compared. Attributes: model; runs: by states and seed; file: what its pictures are
    called."""

    model: str
    runs: Mapping[str, Mapping[int, dict[str, Any]]]
    file: str

    @property
    def spec(self) -> dict[str, Any]:
        first: dict[str, Any] = next(iter(next(iter(self.runs.values())).values()))["spec"]
        return first

    @property
    def software(self) -> str:
        """The device, and the versions of packages."""
        all_of_them = (run["software"] for runs in self.runs.values() for run in runs.values())
        versions = {key: value for software in all_of_them for key, value in software.items()}
        return "; ".join(f"{key} {value}" for key, value in versions.items())

    def final(self, states: str) -> dict[int, float]:
        """The last held-out loss by seed, NaN where it is not finite."""
        last = {seed: run["held_out"][-1][1] for seed, run in self.runs.get(states, {}).items()}
        return {seed: math.nan if loss is None else loss for seed, loss in last.items()}

    def differences(self, states: str) -> list[float]:
        """The last held-out loss less fp32's, of each seed that has both."""
        own, plain = self.final(states), self.final("fp32")
        return [own[seed] - plain[seed] for seed in sorted(own.keys() & plain.keys())]

    @property
    def spread(self) -> float | None:
        """Of fp32's last held-out losses over seeds, the largest less the least."""
        losses = self.final("fp32").values()
        return max(losses) - min(losses) if len(losses) > 1 else None

    def verdict(self, states: str) -> str:
        differences, spread = self.differences(states), self.spread
        if states == "fp32" or not differences:
            return ""
        average = mean(differences)
        if not math.isfinite(average):
            return "diverged"
        if not spread:
            return "no spread with one seed"
        part = abs(average) / spread
        return "within" if part <= 1 else f"{part:.1f} times as much"


def groups(data: Mapping[str, Any]) -> list[Group]:
    found: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for one in data["runs"]:
        spec = one["spec"]
        key = json.dumps({name: spec[name] for name in spec if name not in ("states", "seed")}, sort_keys=True)
        found.setdefault(key, {}).setdefault(spec["states"], {})[spec["seed"]] = one
    order, seen = list(MODELS), Counter[str]()
    all_of_them = []
    for key, runs in found.items():
        model = json.loads(key)["model"]
        seen[model] += 1
        all_of_them.append(Group(model, runs, model if seen[model] == 1 else f"{model}-{seen[model]}"))
    return sorted(all_of_them, key=lambda group: order.index(group.model))


def table(group: Group) -> list[str]:
    """The rows of Markdown."""
    seeds = sorted({seed for runs in group.runs.values() for seed in runs})
    headings = [
        "states",
        *(f"seed {seed}" for seed in seeds),
        "less fp32, mean",
        "standard error",
        "beside fp32's spread",
    ]
    headings += [f"largest update, step {update['step']}" for update in _updates(group)]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    for states in (name for name in COLORS if name in group.runs):
        final, differences = group.final(states), group.differences(states)
        cells = [LABELS[states], *(f"{final[seed]:.4f}" if seed in final else "" for seed in seeds)]
        compared = states != "fp32" and differences
        cells.append(f"{mean(differences):+.4f}" if compared else "")
        cells.append(
            f"{stdev(differences) / math.sqrt(len(differences)):.4f}" if compared and len(differences) > 1 else ""
        )
        cells.append(group.verdict(states))
        for place in range(len(_updates(group))):
            largest = max(run["updates"][place]["max"] for run in group.runs[states].values())
            cells.append(f"{largest:,.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    if group.spread is not None:
        losses = list(group.final("fp32").values())
        lines += ["", f"fp32's spread over seeds: {group.spread:.4f} nats, standard deviation {stdev(losses):.4f}."]
    return lines


def _updates(group: Group) -> list[dict[str, Any]]:
    first = next(iter(next(iter(group.runs.values())).values()))
    updates: list[dict[str, Any]] = first["updates"]
    return updates


def draw_losses(group: Group, file: Path) -> None:
    """Three panels: the loss of batches, the held-out loss, and its difference to fp32's. A line is a mean over seeds,
    a band goes from the least to the largest."""
    figure = new_figure(15, 4.6)
    batches, held_out, differences = figure.subplots(1, 3)
    width = max(1, group.spec["steps"] // 40)
    for states in (name for name in COLORS if name in group.runs):
        runs = group.runs[states]
        steps = range(1, group.spec["steps"] + 1)
        _band(batches, steps, [smoothed(run["losses"], width) for run in runs.values()], states)
        points = [done for done, _ in next(iter(runs.values()))["held_out"]]
        curves = {seed: smoothed([loss for _, loss in run["held_out"]], 1) for seed, run in runs.items()}
        _band(held_out, points, list(curves.values()), states)
        plain = {
            seed: smoothed([loss for _, loss in run["held_out"]], 1) for seed, run in group.runs.get("fp32", {}).items()
        }
        if states == "fp32":
            around = np.array(list(plain.values())) - np.mean(list(plain.values()), axis=0)
            differences.fill_between(
                points,
                around.min(axis=0),
                around.max(axis=0),
                color="black",
                alpha=0.12,
                label='"fp32": seeds less their mean',
            )
        elif pairs := [curves[seed] - plain[seed] for seed in sorted(curves.keys() & plain.keys())]:
            _band(differences, points, pairs, states)
    last = [loss for states in group.runs for loss in group.final(states).values() if math.isfinite(loss)]
    if last:
        held_out.set_ylim(min(last) * 0.9, min(last) * 2.2)
        ends = [smoothed(run["losses"], width)[-1] for runs in group.runs.values() for run in runs.values()]
        batches.set_ylim(min(filter(math.isfinite, ends), default=min(last)) * 0.9, min(last) * 2.2)
    differences.axhline(0, color="black", linewidth=0.8)
    plain_spread = group.spread or 0.01
    differences.set_ylim(-3 * plain_spread, 3 * plain_spread)
    for axes, title in (
        (batches, "loss of batches, smoothed"),
        (held_out, "held-out loss"),
        (differences, "held-out loss less fp32's of the same seed"),
    ):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel("nats a token")
        axes.legend(fontsize=8)
    figure.savefig(file)


def _band(axes: Any, steps: Sequence[int], curves: Sequence[npt.NDArray[np.float64]], states: str) -> None:
    stacked = np.array(curves)
    axes.plot(steps, stacked.mean(axis=0), color=COLORS[states], linewidth=1.4, label=LABELS[states])
    if len(curves) > 1:
        axes.fill_between(
            steps, stacked.min(axis=0), stacked.max(axis=0), color=COLORS[states], alpha=0.15, linewidth=0
        )


def draw_updates(group: Group, file: Path) -> None:
    """A panel for each recorded step: how many of all elements have an update of a size, over all seeds."""
    recorded = _updates(group)
    figure = new_figure(4.2 * len(recorded), 4.2)
    centers = [math.sqrt(low * high) for low, high in pairwise(EDGES)]
    for place, axes in enumerate(np.atleast_1d(figure.subplots(1, len(recorded), sharey=True))):
        for states in (name for name in COLORS if name in group.runs):
            updates = [run["updates"][place] for run in group.runs[states].values()]
            counts = np.sum([update["counts"] for update in updates], axis=0)
            total = counts.sum() + sum(update["zeros"] + update["not_finite"] for update in updates)
            shown = np.where(counts > 0, counts / total, np.nan)
            axes.plot(
                centers, shown, color=COLORS[states], linewidth=1.4, marker=".", markersize=3, label=LABELS[states]
            )
        axes.set(xscale="log", yscale="log", title=f"step {recorded[place]['step']}", xlabel="|update| / lr")
        axes.set_xlim(1e-5, None)
    figure.axes[0].set_ylabel("part of all elements, in bins of 1/8 of a decade")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(file)


def parameters(model: str) -> int:
    setup = MODELS[model]
    small = sum(param.numel() for param in GPT(setup.config, device="meta").parameters())
    return small + 2 * (setup.words - 256) * setup.config.width


def report(options: argparse.Namespace) -> None:
    """Prints the tables, writes the page, and draws the pictures."""
    data = json.loads((options.out / RESULTS).read_text())
    lines = ["# The loss with small states", ""]
    lines += ["`python bench/losses.py run`, then `python bench/losses.py report`", ""]
    lines += [
        "The last held-out loss, in nats a token, and its difference to fp32's of the same seed, a mean over seeds. "
        "fp32's spread is the largest of its losses less the least. The largest update is that of all elements and "
        "seeds, in learning rates. All train a bf16 model with fp32 masters on the sources of Python's standard "
        "library; `bench/losses.py` says how.",
        "",
    ]
    for group in groups(data):
        spec = group.spec
        name = group.model
        words = "bytes" if MODELS[name].words == 256 else f"{MODELS[name].words:,} words, most of them rare"
        lines += [f"## {name}: a GPT over {words}, {parameters(name):,} parameters", ""]
        lines += [f"{spec['steps']} steps of {spec['batch']} x {spec['seq']} tokens; {group.software}.", ""]
        lines += [*table(group), ""]
        if can_draw():
            draw_losses(group, options.out / f"{group.file}.png")
            draw_updates(group, options.out / f"{group.file}-updates.png")
            lines += [f"![Losses]({group.file}.png)", "", f"![Updates]({group.file}-updates.png)", ""]
    lines += [f"- {name}: {why.splitlines()[0]}" for name, why in data["failures"].items()]
    (options.out / "report.md").write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))
    if not can_draw():
        print(f"there are no pictures, because {MISSING}")


def main(arguments: Sequence[str] | None = None) -> None:
    if sys.argv[1:] == ["work"] and arguments is None:
        work()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_run = commands.add_parser("run", help="train")
    add = of_run.add_argument
    add("--out", type=Path, required=True, help=f"folder of {RESULTS}")
    add("--model", type=_names(MODELS), default=["small"], help=f"several with commas, of {', '.join(MODELS)}")
    add("--states", type=_names(COLORS), default=list(COLORS), help=f"several with commas, of {', '.join(COLORS)}")
    add("--seeds", type=int, default=3, help="how many (3)")
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=16, help="windows of a step (16)")
    add("--seq", type=int, default=256, help="tokens of a window (256)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--jobs", type=int, default=1, help="runs at once")
    add("--minutes", type=float, default=1e6, help="after so long runs are stopped, and lost")
    of_run.set_defaults(call=run)
    of_report = commands.add_parser("report", help="tables, page and pictures")
    of_report.add_argument("out", type=Path, help=f"folder of {RESULTS}")
    of_report.set_defaults(call=report)
    options = parser.parse_args(arguments)
    options.call(options)


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: one of {', '.join(known)}, or several with commas")
        return names

    return parse


if __name__ == "__main__":
    main()
