"""`offload plan --config`: the plan of a transformers configuration is that of the model it describes."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload import OffloadZero, Tuning, tile_tokens
from offload.cli.main import app
from offload.planner.activations import TILE
from offload.sizes import format_bytes
from tests.support.command import printed
from tests.support.processes import ROOT
from tests.support.profiled import peak_by_profiler

pytestmark = pytest.mark.peers
transformers = pytest.importorskip("transformers")
fuse_loss = pytest.importorskip("offload.integrations.transformers").fuse_loss

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=128, tie_word_embeddings=True),
    "bert": lambda: transformers.BertConfig(**SIZES, intermediate_size=128),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=96),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("param_tier", ["device", "nvme"])
def test_figures_are_those_of_a_run(name: str, param_tier: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    kind = transformers.BertForMaskedLM if name == "bert" else None
    model = kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path / "model")
    options = ["--tier", "nvme", "--param-tier", param_tier, "--chunk", "64KiB", "--cpu-memory", "4MiB"]
    planned = printed(CliRunner().invoke(app, ["plan", "--json", "--config", str(tmp_path / "model"), *options]))
    with OffloadZero(
        model,
        path=tmp_path / "swap",
        param_tier=param_tier,
        grad_tier="cpu",
        cpu_memory="4MiB",
        commit_every=None,
        tuning=Tuning(chunk="64KiB"),
    ) as optimizer:
        stats = optimizer.stats()
        assert planned["parameters"] == sum(param.numel() for param in model.parameters())
        assert planned["peak_cpu_bytes"] == stats["peak_cpu_bytes"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recompute", [True, False])
def test_activations_are_those_of_a_run(name: str, recompute: bool, tmp_path: Path) -> None:
    """Masks and positions that all blocks share wait once."""
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path / "model")
    options = ["--batch", "3", "--seq", "50", "--dtype", "fp32", "--activation-tier", "nvme"]
    planned = printed(CliRunner().invoke(app, ["plan", "--json", "--config", str(tmp_path / "model"), *options]))
    with OffloadZero(
        model.train(),
        path=tmp_path / "swap",
        compute_dtype=torch.float32,
        activation_tier="nvme",
        tuning=Tuning(recompute=recompute),
    ) as optimizer:
        model(torch.zeros(3, 50, dtype=torch.long))
        found = optimizer.stats()["peak_activation_bytes"]
    if recompute:
        assert planned["entering_bytes"] == found
    else:  # the kernels of a device decide what they save, attention's above all
        assert found <= planned["saved_bytes"] <= 1.25 * found


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_micro_batch_takes_what_a_profiler_of_torch_sees(recomputes: bool, tmp_path: Path) -> None:
    """Of a plain model with its loss: as it is, with MLPs in tiles of tokens, without its logits, and with both.

    With an activation tier, what enters blocks is not on the device. The plan says up to 3 % less and, where it counts
    logits beside the activations of a block, up to a quarter more.
    """
    words = 4096
    tokens = torch.randint(words, (1, 2 * TILE), generator=torch.Generator().manual_seed(0))
    sizes = SIZES | {"vocab_size": words, "intermediate_size": 512}
    config = transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    command = ["plan", "--config", str(tmp_path), "--batch", "1", "--seq", str(2 * TILE), "--dtype", "fp32"]
    command += ["--activation-tier", "cpu"] if recomputes else []
    planned = printed(CliRunner().invoke(app, [*command, "--json"]))

    def seen(*, tiles: bool, chunks: bool) -> int:
        model = transformers.LlamaForCausalLM(config).train()
        if recomputes:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers if tiles else ():
            tile_tokens(layer.mlp, TILE)
        if chunks:
            fuse_loss(model)
        peak = peak_by_profiler(model, lambda: model(tokens, labels=tokens).loss.backward())
        return peak - (planned["entering_bytes"] if recomputes else 0)

    ways = {
        "computed_bytes": seen(tiles=False, chunks=False),
        "computed_bytes_in_tiles": seen(tiles=True, chunks=False),
        "computed_bytes_in_chunks": seen(tiles=False, chunks=True),
        "computed_bytes_in_both": seen(tiles=True, chunks=True),
    }
    for name, found in ways.items():
        assert 0.97 * found <= planned[name] <= 1.25 * found, name
    whole, tiles, chunks, both = (format_bytes(planned[name]) for name in ways)
    shown = " ".join(CliRunner().invoke(app, command, env={"COLUMNS": "200"}).stdout.split())
    assert (
        f"A micro-batch takes {whole} of the device: {chunks} with offload.linear_cross_entropy in place of logits, "
        f"{tiles} with offload.tile_tokens(block.mlp, {TILE}), {both} with both." in shown
    )


def test_a_cache_for_generation_waits_for_the_backward_and_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the keys and values of all blocks but the last, which a recomputation of a later one needs."""
    layer = transformers.cache_utils.DynamicLayer
    update, made = layer.update, []

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        found = update(self, *args, **options)
        made.extend(weakref.ref(one.untyped_storage()) for one in (self.keys, self.values))
        return found

    monkeypatch.setattr(layer, "update", noted)
    there, planned = {}, {}
    for caches in (True, False):
        config = transformers.LlamaConfig(**SIZES, use_cache=caches, architectures=["LlamaForCausalLM"])
        config.save_pretrained(tmp_path / "model")
        command = ["plan", "--json", "--config", str(tmp_path / "model"), "--batch", "2", "--seq", "48"]
        command += ["--dtype", "fp32", "--activation-tier", "cpu"]
        planned[caches] = printed(CliRunner().invoke(app, command))["computed_bytes"]
        made.clear()  # those of the plan
        model = transformers.LlamaForCausalLM(config).train()
        tokens = torch.zeros(2, 48, dtype=torch.long)
        with OffloadZero(model, compute_dtype=torch.float32, activation_tier="cpu", activation_memory="1MiB"):
            loss = model(tokens, labels=tokens).loss
            gc.collect()
            there[caches] = sum(memory.nbytes() for memory in (ref() for ref in made) if memory is not None)
            loss.backward()
            gc.collect()
            assert not any(ref() is not None for ref in made)
    of_a_block = 2 * 2 * 48 * SIZES["hidden_size"] * 4  # keys and values, sequences, tokens, width, fp32
    assert there == {True: 2 * of_a_block, False: 0}
    assert planned[True] - planned[False] == 2 * of_a_block


@pytest.mark.parametrize(("name", "tokens"), [("llama", 2048), ("bert", 4096)])
def test_no_tiles_of_tokens_are_said_where_there_are_none(name: str, tokens: int, tmp_path: Path) -> None:
    """One tile, or blocks without a module of that name."""
    config = CONFIGS[name]()
    config.max_position_embeddings = tokens
    config.architectures = ["LlamaForCausalLM" if name == "llama" else "BertForMaskedLM"]
    config.save_pretrained(tmp_path / "model")
    command = ["plan", "--json", "--config", str(tmp_path / "model"), "--batch", "1", "--seq", str(tokens)]
    assert printed(CliRunner().invoke(app, command))["computed_bytes_in_tiles"] is None


def test_frozen_blocks_and_embeddings_stream(tmp_path: Path) -> None:
    config = CONFIGS["gpt2"]()
    model = transformers.GPT2LMHeadModel(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    frozen = [model.transformer.wte, *model.transformer.h[:2]]  # the head is tied to the embedding
    numel = sum(param.numel() for module in frozen for param in module.parameters())
    options = ["--config", str(tmp_path), "--tier", "cpu", "--param-tier", "nvme"]
    planned = printed(CliRunner().invoke(app, ["plan", "--json", *options, "--frozen", "2"]))
    assert planned["parameters"] + numel == sum(param.numel() for param in model.parameters())
    assert planned["frozen_tier"] == "nvme"
    too_many = CliRunner().invoke(app, ["plan", *options, "--frozen", "4"])
    assert "from 0 to the model's 3 blocks" in too_many.stderr


def test_a_model_that_needs_more_than_tokens_is_planned_by_the_formula(tmp_path: Path) -> None:
    config = transformers.T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=96)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["plan", "--config", str(tmp_path), "--batch", "3", "--seq", "32"])
    assert result.exit_code == 0, result.output
    said = next(line for line in result.output.splitlines() if line.startswith("What enters"))
    assert said.startswith("What enters 4 blocks in a micro-batch of 3 x 32 takes 48 KiB")
    assert (
        "by the formula for transformers: this model's forward does not run on the meta device (ValueError in " in said
    )
    assert "decoder: You must specify " in said


def test_what_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["plan", "--config", str(tmp_path)])
    assert result.exit_code == 2
    assert "no configuration" in result.stderr


@pytest.mark.timeout(900)
def test_adapters_on_a_base_on_nvme_stay_within_the_plan_and_equal_those_of_a_resident_one(tmp_path: Path) -> None:
    """In a memory cgroup of the imports, the planned peak and a tenth of that, where one can be made."""
    size = ["--layers", "2", "--width", "768", "--tokens", "8", "--resident", "--json"]
    command = [sys.executable, "-W", "ignore", "bench/pretrained.py", "lora", *size, "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["adapters are equal"] is True
    assert found["cgroup's peak bytes"] <= found["limit bytes"]
    assert not [*tmp_path.iterdir()]


def test_a_mixture_of_experts_has_its_routing(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        **SIZES, intermediate_size=128, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2
    )
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    options = ["--config", str(tmp_path / "model"), "--batch", "1", "--seq", "4", "--gpu", "--param-tier", "cpu"]
    found = printed(CliRunner().invoke(app, ["plan", "--json", *options]))["experts"]
    assert (found["experts"], found["per_token"]) == (8, 2)
    assert found["expected"] == pytest.approx(8 * (1 - 0.75**4))
    assert found["nbytes"] == 2 * 3 * 8 * 3 * 64 * 128  # bytes, layers, experts, matrices
    assert (found["link"], found["link_expected"]) == (3 * found["nbytes"], 3 * found["nbytes"])  # whole layers
    shown = CliRunner().invoke(app, ["plan", *options]).stdout
    assert "Each token needs 2 of a layer's 8 experts" in shown
    assert "Of their states" not in shown  # which are in RAM
    on_disk = [*options, "--tier", "nvme", "--cpu-memory", "least"]
    found = printed(CliRunner().invoke(app, ["plan", "--json", *on_disk]))["experts"]
    assert found["states_expected"] == found["states"]  # whole layers
    assert 0 < found["states"] == pytest.approx(2 * 12 * found["nbytes"] / 2, rel=0.01)
    assert "Of their states a step reads and writes" in CliRunner().invoke(app, ["plan", *on_disk]).stdout
