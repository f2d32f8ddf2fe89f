"""A context whose logits alone are 19 times the machine's memory: in a memory cgroup, with all that spares activations.

The oracle is plain torch: whole steps at a small size, and the loss alone at the large one, made of a few tokens at a
time. What the process takes is held against `offload plan`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offload
from tests.support.cgroup import memory_cgroup, run_in, was_killed

ROOT = Path(__file__).parents[2]
MIB, GIB = 1 << 20, 1 << 30
LAYERS, WIDTH = 2, 64
TILE = 2048
LARGE, SMALL = (65_536, 151_936), (2_048, 4_001)
"""Tokens, and words of the vocabulary."""
LIMIT = 2 * GIB
CPU_BYTES, CHUNK = 64 * MIB, "1MiB"
TIERS = {"param_tier": "nvme", "grad_tier": "nvme", "activation_tier": "nvme"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.made(x)[:, None].chunk(3, dim=-1)
        found: Tensor = self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        found: Tensor = x + self.mlp(self.norms[1](x))
        return found


class Model(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.norm(x)
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to logits (B, T, V)."""
        found: Tensor = self.head(self.hidden(tokens))
        return found


class Spared(Model):
    """Returns its loss, made in chunks, and has its MLPs in tiles."""

    def __init__(self, words: int) -> None:
        super().__init__(words)
        for block in self.blocks:
            offload.tile_tokens(block.mlp, TILE)

    def forward(self, tokens: Tensor) -> Tensor:
        return offload.linear_cross_entropy(self.hidden(tokens)[0, :-1], self.head, tokens[0, 1:])


def large() -> Model:
    """The model that `offload plan` is asked about."""
    return Model(LARGE[1])


def fill(model: nn.Module) -> None:
    """The same values in each process."""
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=made) * 0.05 + (param.dim() == 1))


def tokens_of(tokens: int, words: int) -> Tensor:
    return torch.randint(words, (1, tokens), generator=torch.Generator().manual_seed(2))


def by_torch(tokens: int, words: int) -> float:
    """The loss of a step, in pieces that fit: nothing is kept for a backward."""
    given, model = tokens_of(tokens, words), Model(words)
    fill(model)
    with torch.no_grad():
        hidden, labels = model.hidden(given)[0, :-1], given[0, 1:]
        pieces = zip(hidden.split(512), labels.split(512), strict=True)
        sums = [F.cross_entropy(model.head(rows), some, reduction="sum").item() for rows, some in pieces]
    return sum(sums) / len(labels)


SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch.nn import functional as F
from tests.model import test_context_in_little_memory as made
from offload import OffloadZero, Tuning

def status(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024

which, tokens, words, steps, options = json.loads(sys.argv[1])
warm = made.Spared(11)  # what torch itself needs
made.fill(warm)
warm(made.tokens_of(300, 11)).backward()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = status("RssAnon")
given = made.tokens_of(tokens, words)
model = getattr(made, which)(words)
made.fill(model)
losses = []
with OffloadZero(
    model, compute_dtype=torch.float32, commit_every=None, tuning=Tuning(chunk=made.CHUNK), **options
) as optimizer:
    for _ in range(steps):
        loss = model(given)
        if which == "Model":
            loss = F.cross_entropy(loss[0, :-1], given[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    peak = status("VmHWM") - status("RssFile") - status("RssShmem") - before
print(json.dumps({"peak": peak, "losses": losses}))
"""


def command(which: str, size: tuple[int, int], steps: int, options: dict[str, Any]) -> list[str]:
    return [sys.executable, "-c", SCRIPT, json.dumps([which, *size, steps, options])]


ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
"""What torch frees goes back at once: how much of it malloc would keep differs from run to run."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)


def planned(*options: str) -> dict[str, Any]:
    """What `offload plan` says of the large model."""
    from typer.testing import CliRunner

    from offload.cli.main import app

    name = f"{__name__}:large"
    found = CliRunner().invoke(app, ["plan", "--model", name, "--json", "--dtype", "fp32", "--batch", "1", *options])
    assert found.exit_code == 0, found.output
    printed: dict[str, Any] = json.loads(found.stdout)
    return printed


def test_steps_are_those_of_plain_torch(tmp_path: Path) -> None:
    """At a small size, within what chunks, tiles and a recomputation round otherwise."""
    tokens, plain, held = tokens_of(*SMALL), Model(SMALL[1]), Spared(SMALL[1])
    fill(plain)
    fill(held)
    reference = torch.optim.AdamW(plain.parameters())
    with offload.OffloadZero(
        held, path=tmp_path, compute_dtype=torch.float32, cpu_memory=CPU_BYTES, **TIERS
    ) as optimizer:
        for _ in range(3):
            loss = held(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            other = F.cross_entropy(plain(tokens)[0, :-1], tokens[0, 1:])
            other.backward()
            reference.step()
            reference.zero_grad()
            torch.testing.assert_close(loss.detach(), other.detach(), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_step_of_64k_tokens_by_150k_words_takes_what_the_plan_says(tmp_path: Path) -> None:
    """Its logits are 37 GiB. The loss is that of plain torch; without the chunks the step ends for lack of memory."""
    found = planned(
        "--seq", str(LARGE[0]), "--cpu-memory", str(CPU_BYTES), "--no-commits", "--param-tier", "nvme",
        "--grad-tier", "nvme", "--activation-tier", "nvme", "--chunk", CHUNK,
    )  # fmt: skip
    room = found["device_bytes"] + found["peak_cpu_bytes"] + found["computed_bytes_in_both"]
    assert room < LIMIT < found["output_bytes"]
    options = TIERS | {"path": str(tmp_path / "run"), "cpu_memory": CPU_BYTES}
    with memory_cgroup(LIMIT) as folder:
        if folder is None:
            pytest.skip("needs the right to make a memory cgroup")
        plain = run_in(folder, command("Model", LARGE, 1, options | {"path": str(tmp_path / "plain")}), timeout=600)
        assert was_killed(plain) or "can't allocate memory" in plain.stderr, plain.stderr
        ended = run_in(folder, command("Spared", LARGE, 1, options), timeout=1500)
    assert ended.returncode == 0, ended.stderr
    measured = json.loads(ended.stdout)
    print(measured, found["device_bytes"], found["peak_cpu_bytes"], found["computed_bytes_in_both"])
    assert measured["losses"] == pytest.approx([by_torch(*LARGE)], rel=1e-5)
    assert measured["peak"] <= room
