"""Runs that were committed by earlier versions of this library, as files. test_stored_runs.py resumes those of one
rank, test_stored_runs_of_ranks.py the others.

A directory is named after the commit of this repository that made the runs in it:

    21e757d    swap file format 1, manifest format 2, COMMIT format 1; before frozen parameters streamed
    c019a63    the same formats; with frozen parameters, and what commits carry of them
    f46cdb4    COMMIT format 2, with names of files that never change
    6612228    manifest formats 3 and 4: another optimizer than Adam, states in other forms than fp32
    d8529f4    manifest format 5: states of other shapes than their parameters', and whole parameters of two ranks
    11c93be    manifest format 6: a kept base, in chunks
    764ae93    the same, with a base of named tensors
    f7598739   manifest format 7: chunks with three slots
    a2f5cb3    manifest format 8: chunks that owe steps
    300669c    manifest format 9: ranks that had one another's shards when they committed

Each archive holds the directories of one run, and plain.safetensors: the states at its commit as plain torch computed
them. A new directory is made, by `python -m tests.checkpoint.stored_runs NAME`, when a version of a format changes or a
format gets a new field. The older ones stay as they are: their runs must be resumed, or refused by a clear error.
"""

from __future__ import annotations

import math
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.quantised import codes_of

FOLDER = Path(__file__).parent
PLAIN = "plain.safetensors"
STEPS = 3
EXPERTS, QUANTISED = 6, "base."
LR, BETAS, EPS = 1e-2, (0.8, 0.99), 1e-6
DECAY = {True: 0.1, False: 0.0}  # of matrices, of vectors
CASES: dict[str, dict[str, Any]] = {
    "states": {},
    "split": {"tuning": {"chunk": "4KiB", "split_master": True}},
    "params": {"param_tier": "nvme"},
    "grads": {"grad_tier": "nvme", "tuning": {"chunk": "256KiB"}},
    "fp32": {"compute_dtype": torch.float32},
    "frozen": {"param_tier": "nvme"},
    "snapshot": {},
    "paths": {"path": ["a", "b"]},
    "stage2": {"stage": 2, "grad_tier": "nvme", "tuning": {"chunk": "256KiB"}},
    "stage3": {"stage": 3, "param_tier": "nvme", "path": ["rank{rank}"]},
    "stage3split": {"stage": 3, "param_tier": "nvme", "tuning": {"chunk": "4KiB", "split_master": True}},
    "bf16": {"states": "bf16"},
    "8bit": {"states": "8bit"},
    "8bitsplit": {"states": "8bit", "tuning": {"chunk": "4KiB", "split_master": True}},
    "adafactor": {"param_tier": "nvme"},
    "muon": {"stage": 3, "param_tier": "nvme"},
    "sgd": {},
    "base": {"param_tier": "nvme", "compute_dtype": torch.float32},
    "trials": {"tuning": {"chunk": "4KiB", "speculate": True}},
    "late": {"param_tier": "nvme", "tuning": {"chunk": "4KiB", "tile": 4 * 4 * 4}},
    "moved": {"stage": 3, "param_tier": "nvme", "path": ["rank{other}"]},
}
"""Options of OffloadZero. Paths are names in the archive, "a" if there are none."""
RANKS = {"stage2": 2, "stage3": 2, "stage3split": 2, "muon": 2, "moved": 2}
"""How many ranks committed a case; the others are runs of one."""


def muon_and_adafactor(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    squares = [param for param in params if param.shape == (4, 4)]
    others = [param for param in params if param.shape != (4, 4)]
    return [torch.optim.Muon(squares, lr=LR), torch.optim.Adafactor(others, lr=LR, weight_decay=0.1)]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]] = {
    "adafactor": lambda params: [torch.optim.Adafactor(params, lr=LR, weight_decay=0.1)],
    "muon": muon_and_adafactor,
    "sgd": lambda params: [torch.optim.SGD(params, lr=LR, momentum=0.9, foreach=False)],
}
"""Those of cases that do not have AdamW."""


class Model(nn.Module):
    """Two chunks in one flat parameter, a transposed matrix, fp32 parameters, and one that misses the first step.

    Some cases have more: layers that are going to be quantised, or matrices of which each step uses two.
    """

    def __init__(self, case: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(260, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[1].weight = nn.Parameter(torch.empty(4, 4).t())
        self.norm = nn.LayerNorm(4)
        self.late = nn.Parameter(torch.empty(4))
        if case == "base":
            self.base = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)).requires_grad_(False)
        if case == "late":
            self.experts = nn.Parameter(torch.empty(EXPERTS, 4, 4))
        with torch.no_grad():  # the same on every machine
            for param in self.parameters():
                param.copy_((torch.arange(param.numel()) * 37 % 101 - 50).view(param.shape) / 64)
        self.blocks[0].requires_grad_(case != "frozen")

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        if hasattr(self, "base"):
            for layer in self.base:
                h = h + torch.tanh(layer(h))
        if hasattr(self, "experts"):
            for number in (step % EXPERTS, (step + 1) % EXPERTS):
                h = h + torch.tanh(h @ self.experts[number])
        h = self.norm(h.float()).to(h.dtype)
        return (h + self.late if step else h).float().square().mean(dim=1).exp().mean()

    def groups(self) -> list[dict[str, Any]]:
        trained = [param for param in self.parameters() if param.requires_grad]
        sorts = {is_matrix: [param for param in trained if (param.dim() > 1) is is_matrix] for is_matrix in DECAY}
        return [{"params": params, "weight_decay": DECAY[is_matrix]} for is_matrix, params in sorts.items()]

    def adamw(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(), lr=LR, betas=BETAS, eps=EPS)

    def optimizers(self, case: str) -> Any:
        """What is given to OffloadZero."""
        return OPTIMIZERS[case](list(self.parameters())) if case in OPTIMIZERS else self.adamw()

    def between_steps(self) -> None:
        """Frozen parameters are written to."""
        if not self.blocks[0].weight.requires_grad:
            with torch.no_grad():
                self.blocks[0].weight.mul_(0.7)


def quantise(model: nn.Module) -> None:
    """Quantises the layers of that case, with values or on the meta device."""
    for name, layer in model.named_modules():
        if name.startswith(QUANTISED) and isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(codes_of(layer), requires_grad=False)


def tokens(step: int, rank: int) -> Tensor:
    return (torch.arange(6) * (step + 3) + 2 * rank) % 7


def extra_of(rank: int) -> dict[str, Any]:
    """What a rank commits beside its states."""
    return {"tokens": 12 + rank, "position": torch.arange(5)}


def options(case: str, folder: Path, rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Of OffloadZero, for a run whose directories lie in `folder`."""
    from offload import Tuning

    found = {
        "commit_every": 0,
        "keep_fp32": [nn.LayerNorm],
        "path": ["a"],
        "tuning": {"chunk": "4KiB"},
        **CASES[case],
        **changes,
    }
    paths = [folder / name.format(rank=rank, other=RANKS.get(case, 1) - 1 - rank) for name in found["path"]]
    return {**found, "path": paths, "tuning": Tuning(threads=1, **found["tuning"])}


def unpacked(archive: Path, folder: Path) -> tuple[str, PlainRun, list[Path]]:
    """Returns: the case, the plain run at the commit, and the directories of the stored one."""
    case = archive.name.removesuffix(".tar.xz")
    with tarfile.open(archive) as stored:
        stored.extractall(folder, filter="data")
    plain = plain_run(case)
    plain.load(folder)
    return case, plain, sorted(path for path in folder.iterdir() if path.is_dir())


def begun(case: str, given: dict[str, Any]) -> tuple[Model, Any]:
    """A model, and an OffloadZero with these options, and the least RAM that is not refused.

    What the model has before a resume has no part in it.
    """
    from offload import BudgetError, OffloadZero

    with torch.device("meta" if case == "base" else "cpu"):
        model = Model(case)
    if case == "base":
        from offload.integrations.quantised import Quantised

        source = given["path"][0].with_suffix(".safetensors")
        save_file({name: value.contiguous() for name, value in Model(case).state_dict().items()}, source)
        given = {**given, "init": Quantised(source, quantise, model, settings="codes of 4 bits"), "device": "cpu"}
    elif given.get("resume"):
        for param in model.parameters():
            if param.requires_grad:
                nn.init.constant_(param, 0.5)
    memory = 1
    while True:  # a resume in another layout learns from the files that it needs more
        try:
            return model, OffloadZero(model, model.optimizers(case), cpu_memory=memory, **given)
        except BudgetError as error:
            memory = error.needed


class PlainRun:
    """The same training, the gradients by plain torch, and AdamW in NumPy, whose square roots are exact.

    Each operation of AdamW is one fp32 operation, in the order that docs/exactness.md states. Over several ranks it
    steps with the average of their gradients, as docs/ranks.md states it: summed in fp32 in rank order, divided, and
    rounded once.
    """

    def __init__(self, case: str) -> None:
        dtype = CASES[case].get("compute_dtype", torch.bfloat16)
        self.form = CASES[case].get("states", "fp32")
        self.model = Model(case)
        named = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        self.masters = {name: param.detach().clone() for name, param in named}
        self.exp_avg = {name: torch.zeros_like(param) for name, param in named}
        self.exp_avg_sq = {name: torch.zeros_like(param) for name, param in named}
        self.steps = {name: 0 for name, _ in named}
        self.model.to(dtype).norm.float()
        quantise(self.model)

    def step(self, step: int, ranks: int = 1) -> None:
        params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        sums: dict[str, Tensor] = {}
        for rank in range(ranks):
            self.model(tokens(step, rank), step).backward()
            for name, param in params.items():
                if param.grad is not None:
                    sums[name] = sums[name] + param.grad.float() if name in sums else param.grad.float()
                    param.grad = None
        self._update({name: (total / ranks).to(params[name].dtype).float() for name, total in sums.items()})
        self.model.between_steps()
        self._cast_masters()

    def _update(self, grads: dict[str, Tensor]) -> None:
        for name, grad in grads.items():
            self._adamw(name, grad)

    def _adamw(self, name: str, grad: Tensor) -> None:
        self.steps[name] += 1
        (beta1, beta2), step, f = BETAS, self.steps[name], np.float32
        p, m, v, g = (of.numpy() for of in (self.masters[name], self.exp_avg[name], self.exp_avg_sq[name], grad))
        p = p * f(1 - LR * DECAY[p.ndim > 1])
        m = m + f(1 - beta1) * (g - m)
        v = v * f(beta2) + (f(1 - beta2) * g) * g
        p = p + (f(-(LR / (1 - beta1**step))) * m) / (np.sqrt(v) / f(math.sqrt(1 - beta2**step)) + f(EPS))
        kept = self._kept(name, [p, m, v])
        self.masters[name], self.exp_avg[name], self.exp_avg_sq[name] = map(torch.from_numpy, kept)

    def _kept(self, name: str, states: list[Any]) -> list[Any]:
        """Small states are rounded in the order of the parameter's memory."""
        if self.form == "fp32":
            return states
        from tests.support.training import kept  # not above: it imports the version of before

        param = self.model.get_parameter(name)
        lying = [of if param.is_contiguous() else of.T for of in states]
        lines = kept([np.ravel(of) for of in lying], self.steps[name], self.form, param.dtype)
        found = [line.reshape(of.shape) for line, of in zip(lines, lying, strict=True)]
        return found if param.is_contiguous() else [of.T for of in found]

    def _cast_masters(self) -> None:
        with torch.no_grad():
            for name, master in self.masters.items():
                self.model.get_parameter(name).copy_(master)

    def states(self) -> dict[str, Tensor]:
        """Everything that has to have the same bits."""
        found = {f"{name}.param": param.detach() for name, param in plain_parameters(self.model)}
        for name, step in self.steps.items():
            of = {"master": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
            found |= {f"{name}.{kind}": tensors[name] for kind, tensors in of.items()}
            found[f"{name}.step"] = torch.tensor(step)
        return {key: value.contiguous().clone() for key, value in found.items()}

    def save(self, folder: Path) -> None:
        save_file(self.states(), folder / PLAIN)

    def load(self, folder: Path) -> None:
        found = load_file(folder / PLAIN)
        for name in self.steps:
            self.masters[name], self.exp_avg[name] = found[f"{name}.master"], found[f"{name}.exp_avg"]
            self.exp_avg_sq[name], self.steps[name] = found[f"{name}.exp_avg_sq"], int(found[f"{name}.step"])
        with torch.no_grad():
            for name, param in plain_parameters(self.model):
                param.copy_(found[f"{name}.param"])


class PlainTorchRun(PlainRun):
    """The same with other optimizers, which torch itself runs on the masters."""

    def __init__(self, case: str) -> None:
        super().__init__(case)
        self.parameters = {name: nn.Parameter(master) for name, master in self.masters.items()}
        self.optimizers: list[torch.optim.Optimizer] = OPTIMIZERS[case](list(self.parameters.values()))

    def _update(self, grads: dict[str, Tensor]) -> None:
        for name, param in self.parameters.items():
            param.grad = grads.get(name)
            self.steps[name] += param.grad is not None
        for optimizer in self.optimizers:
            optimizer.step()

    def states(self) -> dict[str, Tensor]:
        found = {f"{name}.param": param.detach() for name, param in self.model.named_parameters()}
        for name, param in self.parameters.items():
            state = self._optimizer_of(param).state[param]
            found |= {f"{name}.{key}": value for key, value in state.items()}
            found |= {f"{name}.master": param.detach(), f"{name}.step": torch.tensor(self.steps[name])}
        return {key: value.contiguous().clone() for key, value in found.items()}

    def load(self, folder: Path) -> None:
        found = load_file(folder / PLAIN)
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(found.pop(f"{name}.param"))
            for name, param in self.parameters.items():
                param.copy_(found.pop(f"{name}.master"))
                self.steps[name] = int(found.pop(f"{name}.step"))
                optimizer = self._optimizer_of(param)
                state = {key.removeprefix(f"{name}."): one for key, one in found.items() if key.startswith(f"{name}.")}
                if isinstance(optimizer, torch.optim.Adafactor):
                    state["step"] = torch.tensor(float(self.steps[name]))
                optimizer.state[param] = state

    def _optimizer_of(self, param: Tensor) -> torch.optim.Optimizer:
        groups = ((one, group) for one in self.optimizers for group in one.param_groups)
        return next(one for one, group in groups if any(param is other for other in group["params"]))


def plain_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those that are not quantised."""
    return [(name, param) for name, param in model.named_parameters() if not name.startswith(QUANTISED)]


def plain_run(case: str) -> PlainRun:
    return PlainTorchRun(case) if case in OPTIMIZERS else PlainRun(case)


def states_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The same of a run of the library."""
    optimizer.synchronize()
    found = {}
    for name, param in plain_parameters(model):
        with optimizer.gathered(param):
            found[f"{name}.param"] = param.detach().clone()
        if param.requires_grad:
            state = optimizer.state_of(param)
            found |= {f"{name}.{key}": torch.as_tensor(value) for key, value in state.items()}
    return found


def train(model: Model, optimizer: Any, step: int, rank: int = 0) -> None:
    model(tokens(step, rank), step).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.between_steps()


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
