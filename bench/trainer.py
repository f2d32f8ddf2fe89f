"""One contestant of bench/peers.py or bench/hiding.py, in a process of its own, on whatever Python has what it needs.

    python bench/trainer.py '{"kind": "offload", ...}'      (see `Spec`)

It prints {"ready": versions}; then it answers every line on stdin, a JSON object of orders, with one line on stdout.
Between two orders it waits for the pipe, and nothing of it runs.

The argument, a spec: kind: "offload", "torch" or "deepspeed"; model: sizes of a GPT; text: a file of bytes; path: a
folder of its own for swap files; lr; seed; options: of the kind, see `Offload` and `DeepSpeed`.
Orders: steps to be timed, of batch x seq tokens; and if wanted phases: see [Note: what is timed]; updates: False to
drop the gradients instead of stepping; timeline: a file to record in; fresh_peak: whether the answer's peak RSS is that
of these steps alone.

[Note: what is timed]
A block is timed from where the step before it returns until its last step does. That one step goes first, untimed: what
its step() leaves to be done is paid in the block, as what the last one leaves is paid in the next, so a block has whole
steps of a training that goes on. In a block with "phases" every step ends with everything done, and is parted: forward;
backward, until autograd has made its last gradient (the embeddings'); optimizer, from there until the new parameters
can be read and nothing is under way. What a library does with earlier gradients during backward counts as backward.

[Note: the same start]
Initial values are rounded to bf16 first, so that fp32 masters taken before the cast (offload, torch) and after it
(DeepSpeed) are the same numbers.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The repository instead of this folder, whose io.py is not Python's; not every contestant's Python has offload.
    sys.path[0] = str(Path(__file__).parents[1])

import numpy as np
import torch
from torch import Tensor, nn

from offload.demo.gpt import GPT, GPTConfig
from offload.demo.text import Batches

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
Spec = dict[str, Any]
CHUNKS_IN_SLOT = {"fp32": 3.0, "bf16": 2.0, "8bit": 1.5 + 2 / 4 / 64}
"""Bytes of states by those of their fp32 masters, which are the bytes of a chunk."""
SLOT_MARGIN = 64 << 10
"""More than a slot of the swap file has beyond its states: header, padding."""


class Trainer(ABC):
    """A model and its optimizer."""

    model: Any

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.model(tokens, targets)[1]
        assert isinstance(loss, Tensor)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @abstractmethod
    def step(self) -> None:
        """Updates the parameters, and drops the gradients."""

    def synchronize(self) -> None:  # noqa: B027
        """Waits until the new parameters can be read and nothing is under way. Nothing to do where step() waits."""

    def stats(self) -> dict[str, Any]:
        return {}

    def disk_bytes(self) -> float:
        """Bytes moved to and from the disk so far, if `stats` counts them."""
        stats = self.stats()
        return float(stats.get("nvme_read_bytes", 0) + stats.get("nvme_written_bytes", 0))

    def recording(self, file: str) -> Any:
        return nullcontext()


class LastGradient:
    """Notes when autograd made the last gradient of a backward, which is that of the embeddings."""

    def __init__(self, model: Any) -> None:
        self.at = 0.0
        gpt = getattr(model, "module", model)
        for param in (gpt.embed.weight, gpt.positions.weight):
            param.register_hook(self._note)

    def _note(self, grad: Tensor) -> None:
        self.at = time.perf_counter()


class Torch(Trainer):
    """Mixed precision as anyone writes it by hand: a bf16 model, fp32 masters in RAM, and torch's fused AdamW on
    them."""

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        self._masters: list[Tensor] = [p.detach().clone().requires_grad_() for p in model.parameters()]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self.model = model.bfloat16()
        self._params: list[Tensor] = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=spec["lr"], betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(_grads(self._masters), _grads(self._params))
        self._optimizer.step()
        torch._foreach_copy_(self._params, self._masters)
        for param in self._params:
            param.grad = None


class Offload(Trainer):
    """This library. Its options: tier, and param_tier, grad_tier, states and speculate if given; chunk, in bytes;
    buffers: how many chunks fit in RAM beyond the least that works."""

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        from offload import OffloadZero, Tuning
        from offload.planner import least_cpu_memory

        options = spec["options"]
        adamw = torch.optim.AdamW(model.parameters(), lr=spec["lr"], betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        tuning = Tuning(chunk=options["chunk"], speculate=options.get("speculate", False))
        tiers: dict[str, Any] = {name: options.get(name) for name in ("param_tier", "grad_tier")}
        tiers["states"] = states = options.get("states", "fp32")
        places: dict[str, Any] = {"tier": options["tier"], "tuning": tuning} | tiers
        if options["tier"] == "nvme":
            least = least_cpu_memory(model, adamw, tuning=tuning, **tiers)
            room = options["buffers"] * (int(CHUNKS_IN_SLOT[states] * options["chunk"]) + SLOT_MARGIN)
            places |= {"path": spec["path"], "cpu_memory": least + room, "commit_every": None}
        self._optimizer = OffloadZero(model, adamw, **places)
        self.model = model

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def synchronize(self) -> None:
        self._optimizer.synchronize()

    def stats(self) -> dict[str, Any]:
        return self._optimizer.stats()

    def recording(self, file: str) -> Any:
        return self._optimizer.timeline(file)


class DeepSpeed(Trainer):
    """DeepSpeed, on one rank and without a launcher. Its options: zero: "zero_optimization" of its configuration; aio:
    the settings of that name."""

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(_free_port()))
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.init_distributed(dist_backend="gloo")
        config = {
            # Never reached by a step: it only has to be given.
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": spec["options"]["zero"],
            "aio": spec["options"]["aio"],
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": spec["lr"], "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
            },
            "gradient_clipping": 0.0,  # otherwise it clips to a norm of 1
            "steps_per_print": 10**9,
        }
        for name in ("offload_optimizer", "offload_param"):
            if spec["options"]["zero"].get(name, {}).get("device") == "nvme":
                spec["options"]["zero"][name]["nvme_path"] = spec["path"]
        self.model, *_ = deepspeed.initialize(model=model.bfloat16(), config=config)

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()


def _grads(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def _free_port() -> int:
    socket = importlib.import_module("socket")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def build(spec: Spec) -> Trainer:
    """See [Note: the same start]."""
    model = GPT(GPTConfig(**spec["model"]), spec["seed"])
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    kinds: dict[str, Callable[[nn.Module, Spec], Trainer]] = {
        "torch": Torch,
        "offload": Offload,
        "deepspeed": DeepSpeed,
    }
    return kinds[spec["kind"]](model, spec)


class Worker:
    """Carries out orders."""

    def __init__(self, trainer: Trainer, text: Path, seed: int) -> None:
        self._trainer = trainer
        self._last_gradient = LastGradient(trainer.model)
        self._text = np.fromfile(text, dtype=np.uint8)
        self._seed = seed
        self._batches: dict[tuple[int, int], Batches] = {}

    def run(self, orders: Spec) -> dict[str, Any]:
        trainer, phases = self._trainer, orders.get("phases", False)
        if orders.get("fresh_peak"):
            begin_peak_rss()
        shape = (orders["batch"], orders["seq"])
        if shape not in self._batches:
            self._batches[shape] = Batches(self._text, *shape, self._seed, torch.device("cpu"))
        lead = 0 if phases else 1
        batches = [self._batches[shape]() for _ in range(lead + orders["steps"])]
        before, moved = trainer.stats(), io_bytes()
        with trainer.recording(orders["timeline"]) if "timeline" in orders else nullcontext():
            answer = self._steps(batches, lead, phases, orders.get("updates", True))
        after = trainer.stats()
        return answer | {
            "trained": len(batches),
            "stats": {key: after[key] - before[key] for key in after if key.endswith(("_s", "_bytes"))},
            "peak_rss_bytes": peak_rss_bytes(),
            **{key: count - moved[key] for key, count in io_bytes().items()},
        }

    def _steps(self, batches: list[tuple[Tensor, Tensor]], lead: int, phases: bool, updates: bool) -> dict[str, Any]:
        trainer, parts, ends = self._trainer, [], [time.perf_counter()]
        losses: list[Tensor] = []
        forward_bytes = 0.0
        for number, (tokens, targets) in enumerate(batches):
            moved = trainer.disk_bytes()
            times = [time.perf_counter()]
            loss = trainer.forward(tokens, targets)
            times.append(time.perf_counter())
            if number >= lead:
                forward_bytes += trainer.disk_bytes() - moved
            trainer.backward(loss)
            times.append(self._last_gradient.at)
            trainer.step() if updates else trainer.model.zero_grad()
            if phases:
                trainer.synchronize()
            times.append(time.perf_counter())
            ends.append(times[-1])
            parts.append([end - start for start, end in pairwise(times)])
            losses.append(loss.detach())
        trainer.synchronize()
        names = ("forward_s", "backward_s", "optimizer_s")
        columns = {name: [part[i] for part in parts] for i, name in enumerate(names)} if phases else {}
        answer = {"seconds": ends[-1] - ends[lead], "losses": [float(loss) for loss in losses]}
        return answer | {"forward_bytes": forward_bytes, **columns}


def io_bytes() -> dict[str, int]:
    """Bytes that this process has read from and written to drives, as the kernel counts them: with O_DIRECT, and by
    misses and write-backs of the page cache."""
    text = Path("/proc/self/io").read_text()
    names = {"read_bytes": "read_bytes", "written_bytes": "write_bytes"}
    return {name: int(re.findall(rf"(?m)^{key}: (\d+)", text)[0]) for name, key in names.items()}


def begin_peak_rss() -> int:
    """Starts `peak_rss_bytes` anew. Returns: the RSS of the process now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss_bytes()


def peak_rss_bytes() -> int:
    found = re.search(r"(?m)^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    # DeepSpeed prints on stdout, which is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec: Spec = json.loads(sys.argv[1])
    worker = Worker(build(spec), Path(spec["text"]), spec["seed"])
    versions = {"torch": str(torch.__version__)}
    if spec["kind"] == "deepspeed":
        versions["DeepSpeed"] = metadata.version("deepspeed")
    print(json.dumps({"ready": versions}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
