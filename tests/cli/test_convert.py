"""`offload convert`: the call that is printed trains as the configuration says, with plain torch beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from offload.cli.convert import ALSO_ALWAYS, SERVED
from offload.cli.main import app
from tests.optim.test_torch_rules import Lion
from tests.support.command import printed


class Model(nn.Module):
    """What a converted call names `model`: blocks, a head, and an output with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = torch.relu(block(x))
        return SimpleNamespace(loss=nn.functional.mse_loss(self.head(x).float(), y.float()))


BATCHES = 6
ADAM = {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1}


def run(folder: Path, config: dict[str, Any], *options: str) -> Result:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(config))
    return CliRunner().invoke(app, ["convert", str(file), *options])


def converted(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    return printed(run(folder, config, "--json"))


def trained(script: str) -> tuple[list[Tensor], Any]:
    """The weights after the script, and its optimizer, closed."""
    torch.manual_seed(0)
    model = Model()
    names: dict[str, Any] = {"model": model, "loader": batches()}
    exec(compile(script, "script", "exec"), names)
    optimizer = names["optimizer"]
    try:
        weights = [optimizer.state_of(param)["master"] for param in model.parameters()]
    finally:
        optimizer.close()
    return weights, optimizer


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = (3, 8), (3, 1)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in zip("xy", shapes, strict=True)}
        for _ in range(BATCHES)
    ]


def plain(kind: type[torch.optim.Adam], micro_batches: int, clip: float) -> list[Tensor]:
    """What DeepSpeed's engine does with the configuration, in plain torch: it divides the loss by the micro-batches."""
    torch.manual_seed(0)
    model = Model()
    lr, betas, eps, decay = ADAM["lr"], ADAM["betas"], ADAM["eps"], ADAM["weight_decay"]
    optimizer = kind(model.parameters(), lr=lr, betas=tuple(betas), eps=eps, weight_decay=decay)  # type: ignore[arg-type]
    for number, batch in enumerate(batches(), 1):
        (model(**batch).loss / micro_batches).backward()
        if number % micro_batches == 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("kind", "params", "like"),
    [
        ("AdamW", {}, torch.optim.AdamW),
        ("Adam", {}, torch.optim.AdamW),  # DeepSpeed's default is adam_w_mode
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
    ],
)
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_the_script_trains_as_the_configuration_says(
    device: str, kind: str, params: dict[str, Any], like: type[torch.optim.Adam], micro_batches: int, tmp_path: Path
) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": str(tmp_path)}}
    config = {
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.05,
        "optimizer": {"type": kind, "params": ADAM | params},
        "zero_optimization": zero | {"offload_param": {"device": device, "nvme_path": str(tmp_path)}},
    }
    weights, _ = trained(converted(tmp_path, config)["script"])
    for ours, theirs in zip(weights, plain(like, micro_batches, 0.05), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("states", "params", "tier"),
    [
        (None, "nvme", "nvme"),
        (None, "cpu", "cpu"),
        ("none", "cpu", "cpu"),
        ("cpu", "nvme", "nvme"),
        ("nvme", "cpu", "nvme"),
    ],
)
def test_parameters_may_be_on_another_tier_than_states(
    states: str | None, params: str, tier: str, tmp_path: Path
) -> None:
    """OffloadZero refuses a slower tier for trained parameters: their states come along."""
    zero: dict[str, Any] = {"stage": 3, "offload_param": {"device": params, "nvme_path": str(tmp_path)}}
    if states is not None:
        zero["offload_optimizer"] = {"device": states, "nvme_path": str(tmp_path)}
    found = converted(tmp_path, {"optimizer": {"type": "AdamW", "params": ADAM}, "zero_optimization": zero})
    weights, _ = trained(found["script"])
    for ours, theirs in zip(weights, plain(torch.optim.AdamW, 1, 1e9), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert f'    tier="{tier}",' in found["script"]
    told = {row["option"]: row["becomes"] for row in found["options"]}
    if states is not None:
        assert f'tier="{tier}"' in told["zero_optimization.offload_optimizer.device"]


OTHERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": ({"lr": 0.1, "momentum": 0.9, "nesterov": True}, lambda ps: torch.optim.SGD(ps, 0.1, 0.9, nesterov=True)),
    "sgd": ({"lr": "auto"}, torch.optim.SGD),
    "Adagrad": ({"lr": 0.1, "eps": 1e-8}, lambda ps: torch.optim.Adagrad(ps, 0.1, eps=1e-8)),
    "RMSprop": ({}, torch.optim.RMSprop),
    # As DeepSpeed has it: momentum after the update, weights decayed with the learning rate of 1e-3.
    "Lion": ({"betas": [0.9, 0.99], "weight_decay": 0.1}, lambda ps: Lion(ps, 1e-3, (0.9, 0.99), 0.1)),
}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_optimizers_have_the_bits_of_plain_torch(kind: str, device: str, tmp_path: Path) -> None:
    params, make = OTHERS[kind]
    zero = {"stage": 2, "offload_optimizer": {"device": device, "nvme_path": str(tmp_path)}}
    script = converted(tmp_path, {"optimizer": {"type": kind, "params": params}, "zero_optimization": zero})["script"]
    if kind == "Lion":
        assert "from lion_pytorch import Lion\n" in script
        pytest.importorskip("lion_pytorch")
    weights, _ = trained(script)
    torch.manual_seed(0)
    model = Model()
    optimizer = make(model.parameters())
    for batch in batches():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(weights, model.parameters(), strict=True):
        if kind == "Lion":
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-7)  # of another author
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("fp16", "scale"),
    [({}, 2.0**16), ({"initial_scale_power": 7}, 2.0**7), ({"loss_scale": 64}, 64.0)],
)
def test_the_loss_scale(fp16: dict[str, Any], scale: float, tmp_path: Path) -> None:
    config = {"fp16": {"enabled": True} | fp16, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    script = converted(tmp_path, config)["script"]
    names: dict[str, Any] = {"model": Model(), "loader": batches()[:1]}
    exec(compile(script.replace("scaler.update()", "break"), "script", "exec"), names)
    names["optimizer"].close()
    assert names["scaler"].get_scale() == scale
    assert names["scaler"].get_growth_interval() == (2**31 - 1 if "loss_scale" in fp16 else 1000)


def test_activations_wait_in_ram(tmp_path: Path) -> None:
    config = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    found = converted(tmp_path, config)
    assert 'activation_tier="cpu"' in found["script"]
    assert not found["without_counterpart"]
    assert "partition_activations=True" in str(found)
    weights, _ = trained(found["script"])
    assert all(weight.isfinite().all() for weight in weights)


def test_every_option_of_the_file_is_told(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000, "elastic_checkpoint": True},
        "wandb": {"enabled": False},
    }
    found = converted(tmp_path, config)
    told = {row["option"]: row["becomes"] for row in found["options"]}
    assert set(told) == {
        "train_batch_size",
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
    }
    assert "2000" in told["zero_optimization.reduce_bucket_size"]
    left = {row["option"] for row in found["without_counterpart"]}
    assert left == {"zero_optimization.elastic_checkpoint", "wandb.enabled"}
    shown = run(tmp_path, config)
    assert shown.exit_code == 0
    assert "compute_dtype=torch.bfloat16" in shown.stdout
    assert "Without a counterpart" in shown.stdout


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"optimizer": {"type": "Lamb"}}, "Lamb"),
        ({"optimizer": {"type": "Optimizer"}}, "torch's own optimizers are converted"),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type is 'Muon': Muon only supports 2D parameters"),
        ({"optimizer": {"type": "LBFGS"}}, "optimizer.type is 'LBFGS': optimizer is LBFGS, which cannot"),
        ({"optimizer": {"type": "SGD", "params": {"adam_w_mode": True}}}, "DeepSpeed does not take there"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps is 1.5"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4"),
        ({"zero_optimization": {"reduce_bucket_size": -5}}, "reduce_bucket_size is -5"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "offload_optimizer.device is 'gpu'"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes'"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "'loss_scale': -1"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}, "'lr': 'fast'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1.0}}}, "Invalid learning rate"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction is False"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "amsgrad is True"),
        ({"optimizer": {"type": "Adam", "params": {"max_coeff": 10}}}, "max_coeff"),
        ({"optimizer": {"type": "Lion", "params": {"use_triton": True}}}, "use_triton"),
        ([], "no JSON object"),
    ],
)
def test_what_cannot_be_converted(config: Any, said: str, tmp_path: Path) -> None:
    result = run(tmp_path, config)
    assert result.exit_code == 2
    assert "ConfigError" in result.stderr
    assert said in result.stderr


def test_a_switch_may_be_a_word(tmp_path: Path) -> None:
    """As DeepSpeed reads it."""
    off = {"fp16": {"enabled": "false"}, "activation_checkpointing": {"cpu_checkpointing": "False"}}
    script = converted(tmp_path, off)["script"]
    assert script == converted(tmp_path, {})["script"]
    assert converted(tmp_path, {"fp16": {"enabled": "true"}})["script"] != script


@pytest.mark.parametrize(("given", "is_told"), [({}, True), ({"gradient_accumulation_steps": 8}, False)])
def test_a_batch_of_several_micro_batches_is_told(given: dict[str, int], is_told: bool, tmp_path: Path) -> None:
    """DeepSpeed accumulates what is left out, and the call does not."""
    found = converted(tmp_path, {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4} | given)
    (becomes,) = (one["becomes"] for one in found["options"] if one["option"] == "train_batch_size")
    assert ("accumulates 32 / (4 x ranks) micro-batches" in becomes) is is_told


@pytest.mark.parametrize("columns", [20, 80])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_script_is_printed_in_whole_lines(
    columns: int, is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they are: people copy them, and write them to files."""
    section = {"device": "nvme", "nvme_path": "/" + "long/" * 40}
    config = {
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"offload_optimizer": section},
        "fp16": {"enabled": True},
    }
    script = converted(tmp_path, config)["script"]
    assert max(map(len, script.splitlines())) > 200
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    printed_lines = re.sub(r"\x1b\[[0-9;]*m", "", run(tmp_path, config).stdout).splitlines()
    assert [line.rstrip() for line in printed_lines[: len(script.splitlines())]] == script.splitlines()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{")
    for name, said in (("missing", "cannot be read"), ("text", "is not JSON")):
        result = CliRunner().invoke(app, ["convert", str(tmp_path / name)])
        assert result.exit_code == 2
        assert said in result.stderr


def test_the_page_names_options_that_are_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text().split("## Options")[1]
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    known = {*SERVED, "optimizer", *ALSO_ALWAYS}
    assert len(named) > 15
    assert not {name for name in named if not any(one == name or one.endswith(f".{name}") for one in known)}
