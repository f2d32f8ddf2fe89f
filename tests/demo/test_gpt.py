from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadZero, Tuning
from offload.demo.gpt import GPT, PRESETS, GPTConfig, initial_values
from offload.errors import ConfigError
from tests.support.toy import take_step

TINY = GPTConfig(layers=2, width=32, heads=2, context=16)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_parameters_of_their_names(preset: str) -> None:
    config = PRESETS[preset]
    matrices = 12 * config.layers * config.width**2
    norms = (2 * config.layers + 1) * 2 * config.width
    tables = (256 + config.context + 256) * config.width
    parameters = count(GPT(config, device="meta"))
    assert parameters == matrices + norms + tables
    assert parameters == pytest.approx(float(preset[:-1]) * {"m": 1e6, "b": 1e9}[preset[-1]], rel=0.03)


def test_presets_reach_from_a_million_to_two_billion() -> None:
    assert list(PRESETS) == ["1m", "5m", "20m", "125m", "350m", "1b", "2b"]


def test_tied_head_is_one_parameter() -> None:
    untied = GPT(TINY)
    tied = GPT(GPTConfig(layers=2, width=32, heads=2, context=16, tied_head=True))
    assert tied.head.weight is tied.embed.weight
    assert count(untied) - count(tied) == 256 * 32


def test_logits_see_no_later_byte() -> None:
    model = GPT(TINY, seed=1)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    logits, _ = model(tokens)
    after, _ = model(changed)
    assert torch.equal(logits[:, :9], after[:, :9])
    assert not torch.allclose(logits[:, 9:], after[:, 9:])


def test_same_seed_gives_the_same_bits_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, same, other = GPT(TINY, seed=3), GPT(TINY, seed=3), GPT(TINY, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_untrained_loss_is_that_of_a_guess() -> None:
    tokens = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
    _, loss = GPT(TINY)(tokens, tokens)
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # ln 256


def test_loss_is_fp32_of_bf16_parameters() -> None:
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    logits, loss = GPT(TINY).bfloat16()(tokens, tokens)
    assert (logits.dtype, loss.dtype, loss.shape) == (torch.bfloat16, torch.float32, ())


def test_every_parameter_learns() -> None:
    model = GPT(TINY)
    tokens = torch.arange(16)[None]
    _, loss = model(tokens, tokens + 1)
    loss.backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_loss_falls_in_plain_torch() -> None:
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.tensor(list(b"to be or not to be, to be or not."))
    losses = []
    for _ in range(60):
        _, loss = model(text[None, :16], text[None, 1:17])
        take_step(optimizer, loss)
        losses.append(loss.item())
    assert losses[-1] < 1 < 5 < losses[0]


def kept_bytes(model: GPT) -> int:
    """By autograd from a forward of 16 tokens, parameters not counted."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}
    tensors: list[Tensor] = []  # alive, or the next one could lie in its place

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.arange(16)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(size for address, size in storages.items() if address not in parameters)


@pytest.mark.parametrize(("checkpointed", "widths"), [(False, 16), (True, 1)])
def test_checkpointing_keeps_of_a_block_only_what_enters_it(checkpointed: bool, widths: int) -> None:
    two, five = (
        kept_bytes(GPT(GPTConfig(layers, width=32, heads=2, context=16), checkpoint_activations=checkpointed))
        for layers in (2, 5)
    )
    assert (five - two) / 3 == pytest.approx(widths * 16 * 32 * 4, rel=0.02)  # tokens, width, bytes; norms' statistics


def test_checkpointing_runs_a_block_again_in_backward_and_only_there() -> None:
    model = GPT(TINY, checkpoint_activations=True)
    calls = Counter[bool]()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: calls.update([torch.is_grad_enabled()]))
    tokens = torch.arange(16)[None]
    model.generate(tokens[0], 1, temperature=0)
    assert calls == {False: 2}
    model(tokens, tokens)[1].backward()
    assert calls == {False: 2, True: 4}


STREAMED = {"param_tier": "nvme", "grad_tier": "nvme"}


def trained(path: Path, tier: dict[str, Any], checkpointed: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of three steps, masters after them."""
    is_streamed = bool(tier)
    model = GPT(TINY, 3, "meta" if is_streamed else "cpu", checkpoint_activations=checkpointed)
    options = tier | {"init": initial_values(TINY, 3)} if is_streamed else {}
    losses = []
    text = torch.randint(256, (3, 2, 17), generator=torch.Generator().manual_seed(0))
    with OffloadZero(model, path=path, tuning=Tuning(chunk="256KiB"), **options) as optimizer:
        for batch in text:
            loss = model(batch[:, :-1], batch[:, 1:])[1]
            take_step(optimizer, loss)
            losses.append(loss.detach())
        return losses, {name: optimizer.state_of(param)["master"] for name, param in model.named_parameters()}


@pytest.mark.parametrize("tier", [{}, STREAMED], ids=["resident", "streamed"])
def test_checkpointing_changes_no_bit(tier: dict[str, Any], tmp_path: Path) -> None:
    losses, masters = trained(tmp_path / "kept", {}, checkpointed=False)
    found, weights = trained(tmp_path / "again", tier, checkpointed=True)
    assert all(torch.equal(one, other) for one, other in zip(losses, found, strict=True))
    assert [name for name in masters if not torch.equal(masters[name], weights[name])] == []
    assert len({loss.item() for loss in losses}) == 3


def test_generate_keeps_the_prompt_and_repeats_itself_under_a_seed() -> None:
    model = GPT(TINY)
    prompt = torch.tensor([1, 2, 3])
    # 20 bytes: past the context of 16, where the window has to move on.
    texts = [model.generate(prompt, 20, 0.8, torch.Generator().manual_seed(7)) for _ in range(2)]
    assert texts[0].shape == (23,)
    assert torch.equal(texts[0][:3], prompt)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], model.generate(prompt, 20, 0.8, torch.Generator().manual_seed(8)))


def test_generate_at_temperature_zero_takes_the_likeliest_byte() -> None:
    model = GPT(TINY)
    prompt = torch.tensor([5, 6])
    logits, _ = model(prompt[None])
    assert model.generate(prompt, 1, temperature=0)[-1] == logits[0, -1].argmax()


def test_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens.*context is 16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"width": 33}, {"heads": -1}, {"context": 0}])
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    sizes = {"layers": 1, "width": 32, "heads": 2} | wrong
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GPTConfig(**sizes)
