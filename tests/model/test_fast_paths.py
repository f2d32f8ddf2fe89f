"""Torch's transformer and attention take another path, with other numbers, where their tensors are plain: a held model
takes the one that plain torch takes, with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from tests.oracle.harness import TIERS

WIDTH, LENGTH, VOCABULARY = 16, 6, 11

UNITS = {
    "layers": None,
    "the encoder": ["encoder"],
    "parts of layers": [nn.Linear, nn.MultiheadAttention, nn.LayerNorm],
}

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


class Encoder(nn.Module):
    def __init__(self, *, nested: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=nested)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=padding))
        return out


def tokens_and_padding() -> tuple[Tensor, Tensor]:
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[0, 4:] = padding[2, 2:] = True
    return torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1)), padding


def hold(model: nn.Module, placement: str, path: Path, units: Any = None) -> OffloadZero:
    given: dict[str, Any] = {**TIERS[placement], "tuning": Tuning(chunk="256KiB", units=units, threads=1)}
    if "nvme" in placement:
        given["path"] = path
    return OffloadZero(model, compute_dtype=torch.float32, commit_every=None, **given)


def observe(plain: Encoder, model: Encoder) -> None:
    """Gives the plain layers hooks if those of a held model have some: torch leaves out the path of a layer then."""
    if any(module._forward_hooks for module in model.encoder.layers.modules()):
        for layer in plain.encoder.layers:
            layer.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("placement", TIERS)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "padded"])
def test_an_encoder_evaluates_padded_batches_as_plain_torch(
    placement: str, units: str, nested: bool, tmp_path: Path
) -> None:
    model = Encoder(nested=nested)
    plain = copy.deepcopy(model)
    tokens, padding = tokens_and_padding()
    with hold(model, placement, tmp_path, UNITS[units]) as optimizer:
        if not nested:
            observe(plain, model)
        for _ in range(2):
            model.train()
            plain.train().zero_grad()
            for one in (model, plain):
                one(tokens, padding)[~padding].square().mean().backward()
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(param.grad, expected.grad)
            optimizer.step()
            optimizer.zero_grad()
            plain.load_state_dict(model.state_dict())
            plain.eval()
            model.eval()
            contexts: list[Callable[[], AbstractContextManager[Any]]] = [
                torch.no_grad,
                torch.inference_mode,
                torch.enable_grad,
            ]
            for context in contexts:
                for mask in (padding, None):
                    with context():
                        assert torch.equal(model(tokens, mask), plain(tokens, mask))


def attended(attention: nn.MultiheadAttention, x: Tensor, padding: Tensor) -> Tensor:
    out: Tensor = attention(x, x, x, attn_mask=padding[0].expand(LENGTH, LENGTH), need_weights=False)[0]
    return out


PARTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "the encoder": lambda model, x, padding: model.encoder(x, src_key_padding_mask=padding),
    "a layer": lambda model, x, padding: model.encoder.layers[1](x),
    "an attention": lambda model, x, padding: attended(model.encoder.layers[1].self_attn, x, padding),
    "the encoder of parameters": lambda model, x, padding: model.encoder(
        model.encoder.layers[2].linear1.weight[: 3 * LENGTH].view(3, LENGTH, WIDTH), src_key_padding_mask=padding
    ),
}


@pytest.mark.parametrize("placement", TIERS)
@pytest.mark.parametrize("units", ["layers", "the encoder", "one"])
@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_parts_that_are_called_by_themselves_evaluate_as_in_plain_torch(
    part: str, units: str, placement: str, tmp_path: Path
) -> None:
    model = Encoder().eval()
    plain = copy.deepcopy(model)
    _, padding = tokens_and_padding()
    x = torch.randn(3, LENGTH, WIDTH)
    with hold(model, placement, tmp_path, UNITS.get(units, [])):
        assert torch.equal(PARTS[part](model, x, padding), PARTS[part](plain, x, padding))


def test_the_fast_path_is_another_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing here would fail."""
    model = Encoder().eval()
    tokens, padding = tokens_and_padding()
    with torch.no_grad():
        fast = model(tokens, padding)
        monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
        assert not torch.equal(model(tokens, padding), fast)
