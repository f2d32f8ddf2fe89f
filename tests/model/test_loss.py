"""`linear_cross_entropy`: the loss of an output layer without its logits, against plain torch."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor

from offload import AccumulationError, ConfigError, OffloadZero, Tuning, linear_cross_entropy
from offload.model import loss as losses
from offload.model.loss import LossLinear, Reduction
from offload.model.transfer import UnitTransfers
from offload.planner.explain import plan_of
from tests.support.cases import often
from tests.support.streamed import Body, Streams, finish
from tests.support.toy import WIDTH, Block

WORDS = 41
"""With BLOCK words a block it has a last block that is not full."""
BLOCK = 12


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "BLOCK", BLOCK)
    monkeypatch.setattr(losses, "CHUNK", 8)


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: float | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """The same by torch's own functions."""
    logits = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits, flat = logits.flatten(0, -2), labels.flatten()
    each = F.cross_entropy(logits, flat, ignore_index=ignore_index, reduction="none")
    counts = flat != ignore_index
    each = each + z_loss * logits.logsumexp(-1).square() * counts
    if reduction == "none":
        return each.view(labels.shape)
    return each.sum() / (1 if reduction == "sum" else counts.sum() if num_items is None else num_items)


def tensors(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden `(3, 7, WIDTH)`, a weight, a bias, and labels, some of which do not count."""
    random = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=random).to(dtype) for shape in ((3, 7, WIDTH), (WORDS, WIDTH), (WORDS,))]
    labels = torch.randint(WORDS, (3, 7), generator=random)
    labels[0, 2] = labels[2, :3] = -100
    hidden, weight, bias = (one.requires_grad_() for one in made)
    return hidden, weight, bias, labels


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "num_items": {"num_items": 50},
    "softcap": {"softcap": 3.0},
    "scaled": {"logit_scale": 0.25},
    "z_loss": {"z_loss": 1e-2},
    "all": {"softcap": 5.0, "logit_scale": 1.7, "z_loss": 1e-2, "num_items": 17},
    "all-none": {"softcap": 5.0, "logit_scale": 1.7, "z_loss": 1e-2, "reduction": "none"},
}


@pytest.mark.parametrize("chunk", [None, 1, 5, 1000])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_torch(options: dict[str, Any], chunk: int | None) -> None:
    hidden, weight, bias, labels = tensors()
    inputs = [hidden, weight, bias]
    expected, found = (
        plain(*inputs, labels, **options),
        linear_cross_entropy(hidden, (weight, bias), labels, chunk=chunk, **options),
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_result = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, inputs, of_result), torch.autograd.grad(expected, inputs, of_result), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("blocked", [1, 2])
def test_words_that_a_bias_rules_out(blocked: int, reduction: str) -> None:
    """Whole blocks of the vocabulary may be ruled out, the first ones too."""
    chance = torch.Generator().manual_seed(0)
    words = 2 * BLOCK + 7
    weight, hidden = (torch.randn(size, 3, generator=chance, dtype=torch.float64) for size in (words, 5))
    bias = torch.zeros(words, dtype=torch.float64)
    bias[: blocked * BLOCK] = -torch.inf
    labels = torch.tensor([words - 1, words - 3, -100, words - 2, words - 7])
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    expected = plain(*inputs, bias, labels, reduction=reduction)
    found = linear_cross_entropy(hidden, (weight, bias), labels, reduction=reduction)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(loss.sum(), inputs) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_within_those_of_torch(dtype: torch.dtype, reduction: str) -> None:
    """Both against fp64: of the same values, with the layer in `dtype` and the loss in fp32."""

    def worst(loss_of: Callable[..., Tensor]) -> list[float]:
        hidden, weight, bias, labels = tensors(dtype)
        inputs = [hidden, weight, bias]
        exact = [one.detach().double().requires_grad_() for one in inputs]
        expected = plain(*exact, labels, reduction=reduction)
        result = loss_of(*inputs, labels, reduction=reduction)
        scale = 1024.0 if dtype is torch.float16 else 1.0
        found = torch.autograd.grad(result.sum() * scale, inputs)
        exact_grads = torch.autograd.grad(expected.sum(), exact)
        grads = ((one.double() / scale, other) for one, other in zip(found, exact_grads, strict=True))
        pairs = [(result.flatten(), expected.flatten()), *grads]
        return [((one - other).abs().max() / other.abs().max()).item() for one, other in pairs]

    def torchs(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, reduction: str) -> Tensor:
        logits = F.linear(hidden, weight, bias).float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, reduction: Any) -> Tensor:
        return linear_cross_entropy(hidden, (weight, bias), labels, reduction=reduction)

    epsilon = torch.finfo(dtype).eps
    for one, other in zip(worst(ours), worst(torchs), strict=True):
        assert one <= max(2 * other, 2 * epsilon)
    assert linear_cross_entropy(*_with_pair(tensors(dtype))).dtype is torch.float32


def _with_pair(made: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    hidden, weight, bias, labels = made
    return hidden, (weight, bias), labels


class Words(nn.Module):
    """Predicts the next word, and returns its loss."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=kind not in ("tied", "no bias"))
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.head.requires_grad_(False)

    def hidden(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, words: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return linear_cross_entropy(self.hidden(words), self.head, labels, **options)


def words_of(count: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(count)
    words, labels = (torch.randint(WORDS, (3, 7), generator=random) for _ in range(2))
    labels[count % 3, 2:4] = -100
    return words, labels


def training(backwards: int = 1, steps: int = 3, **options: Any) -> Body:
    def body(model: Any, optimizer: Any) -> None:
        for count in range(steps * backwards):
            loss = model(*words_of(count), **options)
            (loss.square().mean() if loss.dim() else loss).backward()
            optimizer.losses.append(loss.sum().item())
            if (count + 1) % backwards == 0:
                finish(optimizer)

    return body


def tuning(**options: Any) -> Tuning:
    chosen: dict[str, Any] = {"chunk": "4KiB", "prefetch_chunks": 1, "prefetch_units": 1, "threads": 1}
    return Tuning(**chosen | options)


CAPPED = {"softcap": 4.0, "logit_scale": 1.5, "z_loss": 1e-3, "num_items": 20}
UNITS = ("head", Block)


@pytest.mark.parametrize(
    ("kind", "units", "backwards", "options"),
    [
        ("", None, 1, {}),
        ("", UNITS, 2, CAPPED),
        ("", UNITS, 1, {"reduction": "none"}),
        ("tied", None, 2, {"reduction": "none"}),
        ("tied", (Block,), 1, {}),
        ("frozen", UNITS, 1, {"reduction": "sum"}),
        ("frozen", UNITS, 2, {"reduction": "none"}),
    ],
)
def test_the_same_bits_on_every_tier(
    streams: Streams, kind: str, units: Any, backwards: int, options: dict[str, Any]
) -> None:
    chosen = tuning(units=units)
    body = training(backwards, **options)
    streams.assert_same_bits(body, lambda: Words(kind), tuning=chosen, accumulation=backwards)


@pytest.mark.parametrize(
    ("block", "backwards", "options"),
    [
        (12, 1, {}),
        (12, 2, CAPPED),
        (40, 1, {"reduction": "none"}),
        (40, 1, {"z_loss": 1e-3, "reduction": "sum"}),
        (BLOCK, 2, {"reduction": "none"}),
    ],
)
@pytest.mark.parametrize("kind", ["", "frozen"])
def test_the_same_bits_in_tiles(
    streams: Streams, kind: str, block: int, backwards: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile is 16 words: a block lies in several, and a tile ends inside of a block."""
    monkeypatch.setattr(losses, "BLOCK", block)
    monkeypatch.setattr(Block, "forward", lambda self, x: x * self.before)  # whose layers would run in tiles, too
    body = training(backwards, **options)
    given: dict[str, Any] = {"accumulation": backwards, "compute_dtype": torch.float32}  # which shows the order of sums
    expected_losses, expected = streams.run(body, lambda: Words(kind), param_tier="device", **given)
    for prefetch in (0, 2):
        chosen = tuning(tile=200, prefetch_units=prefetch)
        found_losses, found = streams.run(body, lambda: Words(kind), tuning=chosen, **given)
        assert found_losses == expected_losses
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("tile", "fetches"), [(0, {"mean": 1, "none": 2}), (300, {"mean": 3 * 2, "none": 3 * 2})])
def test_the_weight_is_fetched_once_a_pass_that_needs_it(
    streams: Streams, tile: int, fetches: dict[Reduction, int]
) -> None:
    """In the forward, and in the backward only if that computes logits; whatever the number of chunks."""
    copy = UnitTransfers._start_copy
    for reduction, expected in fetches.items():
        for chunk in (1, 21):
            fetched: Counter[str] = Counter()

            def count(self: Any, unit: Any, *args: Any, fetched: Counter[str] = fetched) -> None:
                fetched[unit.name] += 1
                copy(self, unit, *args)

            model, chosen = Words("no bias"), tuning(units=UNITS, prefetch_units=0, tile=tile)
            with (
                patch.object(UnitTransfers, "_start_copy", count),
                streams.optimizer(model, tuning=chosen) as optimizer,
            ):
                loss = model(*words_of(0), reduction=reduction, chunk=chunk).sum()
                with torch.no_grad():
                    model.hidden(words_of(0)[0])  # what stayed of the head goes
                loss.backward()
                assert sum(n for name, n in fetched.items() if name.startswith("head")) == expected
                optimizer.step()


class Scaled(Words):
    """The root uses a parameter of its own before the head, without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def hidden(self, words: Tensor) -> Tensor:
        return super().hidden(words) * self.scale


def test_the_root_stays_while_the_backward_of_the_head_fetches_it(streams: Streams) -> None:
    streams.assert_same_bits(training(reduction="none"), Scaled, tuning=tuning(units=UNITS, prefetch_units=0))


def test_a_second_backward_through_gradients_of_the_forward_is_refused(streams: Streams) -> None:
    model = Words()
    with streams.optimizer(model, accumulation=2):
        loss = model(*words_of(0))
        loss.backward(retain_graph=True)
        with pytest.raises(AccumulationError, match='call it once for each backward, or with reduction="none"'):
            loss.backward()
        each = model(*words_of(0), reduction="none")
        each.sum().backward(retain_graph=True)


@pytest.mark.parametrize("tile", [0, 500])
def test_the_gradient_of_one_tensor_is_asked_for(streams: Streams, tile: int) -> None:
    hidden, _, _, labels = tensors(torch.bfloat16)
    model = Words()
    weight, bias = (one.detach().bfloat16().requires_grad_() for one in (model.head.weight, model.head.bias))
    expected = torch.autograd.grad(linear_cross_entropy(hidden, (weight, bias), labels), [hidden, weight, bias])
    with streams.optimizer(model, tuning=tuning(tile=tile)):
        for asked, other in zip(("hidden", "weight", "bias"), expected, strict=True):
            inputs = {"hidden": hidden, "weight": model.head.weight, "bias": model.head.bias}
            (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, model.head, labels), [inputs[asked]])
            assert torch.equal(grad, other)
        with torch.no_grad():
            loss = linear_cross_entropy(hidden, model.head, labels)
        assert not loss.requires_grad
        assert torch.equal(loss, linear_cross_entropy(hidden, (weight, bias), labels))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tile", [None, 0, 500])
def test_labels_and_their_number_may_be_written_to_after_the_forward(
    streams: Streams, tile: int | None, reduction: Reduction
) -> None:
    """A loader may fill the same memory with its next batch. Torch would refuse the backward."""
    hidden, weight, bias, labels = tensors()
    items = torch.tensor(17.0) if reduction == "mean" else None
    options: dict[str, Any] = {"reduction": reduction} | ({} if items is None else {"num_items": 17.0})
    expected = torch.autograd.grad(plain(hidden, weight, bias, labels, **options).sum(), [hidden, weight, bias])
    model = Words()
    model.load_state_dict(model.state_dict() | {"head.weight": weight, "head.bias": bias})
    given = {"compute_dtype": torch.float32, "tuning": tuning(tile=tile or 0)}
    with contextlib.nullcontext() if tile is None else streams.optimizer(model, **given):
        own = hidden.to(model.head.weight.dtype).detach().requires_grad_()
        loss = linear_cross_entropy(own, model.head, labels, reduction=reduction, num_items=items)
        labels.fill_(0)
        if items is not None:
            items.fill_(1)
        found = torch.autograd.grad(loss.sum(), [own, model.head.weight, model.head.bias])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tile", [None, 500])
def test_a_backward_that_makes_a_graph_is_refused(streams: Streams, tile: int | None, reduction: Reduction) -> None:
    """As a penalty of gradients has it, which would train nothing where gradients are made outside of autograd."""
    hidden, _, _, labels = tensors(torch.float32)
    model = Words()
    given = {"compute_dtype": torch.float32, "tuning": tuning(tile=tile)}
    with contextlib.nullcontext() if tile is None else streams.optimizer(model, **given):
        loss = linear_cross_entropy(hidden, model.head, labels, reduction=reduction).sum()
        with pytest.raises(ConfigError, match=r"create_graph=True, and linear_cross_entropy gives no gradients of"):
            torch.autograd.grad(loss, hidden, create_graph=True)
        loss = linear_cross_entropy(hidden, model.head, labels, reduction=reduction).sum()
        torch.autograd.grad(loss, hidden, retain_graph=True)


def prune_half(head: nn.Linear) -> None:
    prune.l1_unstructured(head, "weight", 0.5)


@pytest.mark.parametrize("change", [nn.utils.weight_norm, nn.utils.spectral_norm, prune_half])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_head_whose_weight_is_made_by_a_hook_is_refused(change: Callable[[nn.Linear], object]) -> None:
    """The hook would not run: its weight is the one of the last forward."""
    hidden, _, _, labels = tensors(torch.float32)
    head = nn.Linear(WIDTH, WORDS)
    change(head)
    with pytest.raises(ConfigError, match="the weight of head is made by a hook of its forward"):
        linear_cross_entropy(hidden, head, labels)


def test_a_head_without_a_shape_is_refused() -> None:
    hidden, labels = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    head = nn.LazyLinear(4)
    for one in (head, head.weight, (head.weight, None)):
        with pytest.raises(
            ConfigError, match="whose weight has no shape before its first forward: call the module once"
        ):
            linear_cross_entropy(hidden, one, labels)
    head(hidden)
    found = linear_cross_entropy(hidden, head, labels)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(head(hidden), labels))


def test_a_parametrized_head_is_computed_anew() -> None:
    torch.manual_seed(0)
    hidden, _, _, labels = tensors(torch.float32)
    head = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WORDS))
    adam = torch.optim.SGD(head.parameters(), lr=1.0)
    for _ in range(3):
        loss = linear_cross_entropy(hidden, head, labels)
        torch.testing.assert_close(loss, F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten()))
        loss.backward()
        adam.step()
        adam.zero_grad()


def test_the_meta_device_has_shapes_and_gradients() -> None:
    """`offload plan` runs models there."""
    hidden, weight, bias, labels = (
        one.detach().to("meta").requires_grad_(one.requires_grad) for one in tensors(torch.bfloat16)
    )
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, (weight, bias), labels, reduction=reduction)  # type: ignore[arg-type]
        assert (loss.shape, loss.dtype) == (() if reduction == "mean" else labels.shape, torch.float32)
        grads = torch.autograd.grad(loss.sum(), [hidden, weight, bias])
        assert [(one.shape, one.dtype) for one in grads] == [(x.shape, x.dtype) for x in (hidden, weight, bias)]


def test_a_number_of_items_may_be_one_of_numpy() -> None:
    hidden, weight, _, labels = tensors()
    expected = linear_cross_entropy(hidden, weight, labels, num_items=5)
    for items in (np.int64(5), np.float32(5), torch.tensor([5])):
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, num_items=items), expected)


def test_no_token_that_counts() -> None:
    """As in torch: the loss is NaN, and all gradients are 0."""
    hidden, weight, bias, labels = tensors()
    loss = linear_cross_entropy(hidden, (weight, bias), torch.full_like(labels, -100))
    loss.backward()
    assert loss.isnan()
    assert not any(one.grad.any() for one in (hidden, weight, bias) if one.grad is not None)


def test_under_autocast_the_layer_is_computed_in_its_dtype() -> None:
    hidden, weight, bias, labels = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(hidden, (weight, bias), labels)
    cast = [one.detach().bfloat16().requires_grad_() for one in (hidden, weight, bias)]
    expected = linear_cross_entropy(cast[0], (cast[1], cast[2]), labels)
    assert torch.equal(found, expected)
    grads = torch.autograd.grad(found, [hidden, weight, bias])
    assert [one.dtype for one in grads] == [torch.float32] * 3
    for one, other in zip(grads, torch.autograd.grad(expected, cast), strict=True):
        assert torch.equal(one.bfloat16(), other)


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_a_loss_scale_of_fp16(param_tier: str) -> None:
    """Gradients too small for fp16 come through, as in plain torch's mixed precision."""

    def train(model: nn.Module, optimizer: Any, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        found = []
        for count in range(3):
            loss = loss_of(*words_of(count)) / 4096  # as of a batch of many tokens
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-4).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**16
        return found

    model, other = Words(), Words()
    expected = train(
        other,
        torch.optim.AdamW(other.parameters(), lr=1e-2),
        lambda words, labels: F.cross_entropy(other.head(other.hidden(words)).flatten(0, 1), labels.flatten()),
    )
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with OffloadZero(model, adam, param_tier=param_tier, compute_dtype=torch.float16, tuning=tuning()) as optimizer:
        found = train(model, optimizer, model)
    assert found == pytest.approx(expected, rel=0.01)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "chunk": ({"chunk": 0}, "chunk=0: give a number of tokens, at least 1"),
    "reduction": ({"reduction": "max"}, 'reduction=\'max\': give "mean", "sum" or "none"'),
    "num_items": ({"num_items": 0}, "num_items=0: give a number above 0"),
    "ignore_index": ({"ignore_index": None}, "ignore_index=None: give the label of tokens that do not count"),
    "num_items with a graph": (
        {"num_items": torch.ones((), requires_grad=True)},
        "give a number above 0, or a tensor of one without a graph",
    ),
    "num_items of a sum": ({"num_items": 3, "reduction": "sum"}, 'num_items=3: give it with reduction="mean" only'),
    "softcap": ({"softcap": 0.0}, "softcap=0.0: give a number above 0, or None"),
    "logit_scale": ({"logit_scale": 0}, "logit_scale=0: give a number that is not 0"),
    "z_loss": ({"z_loss": -1.0}, "z_loss=-1.0: give a number, at least 0"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_an_option_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    hidden, weight, _, labels = tensors()
    with pytest.raises(ConfigError, match=re.escape(message)):
        linear_cross_entropy(hidden, weight, labels, **options)


def test_tensors_that_do_not_go_together_are_refused() -> None:
    hidden, weight, bias, labels = tensors()
    wrong = labels.clone()
    wrong[1, 1] = WORDS
    calls: list[tuple[tuple[Any, Any, Any], str]] = [
        ((hidden, weight, wrong), f"the label {WORDS}, and the output layer has {WORDS} words"),
        ((hidden, weight, labels.clamp(min=-1)), "the label -1,"),
        ((hidden, weight, labels[:2]), "give a label for each token"),
        ((hidden, weight, labels.double()), "labels of torch.float64: give indices"),
        ((hidden, weight.t(), labels), r"give hidden (..., H) and a weight (V, H)"),
        ((hidden, (weight, bias[1:]), labels), "a bias of (40,) and 41 words"),
        ((hidden, weight.float(), labels), "hidden of torch.float64 and a weight of torch.float32"),
        (
            (hidden, nn.Sequential(nn.Linear(WIDTH, WORDS)), labels),
            "head is a Sequential, whose forward",
        ),
        ((hidden, "lm_head", labels), "head is str: give an nn.Linear"),
        ((hidden, (weight, bias, None), labels), "head is tuple: give an nn.Linear"),
        ((hidden.tolist(), weight, labels), "hidden of type list: give a tensor"),
        ((hidden, weight, labels.tolist()), "labels of type list: give a tensor"),
        ((hidden, TwoTensor(weight, weight), labels), "a TwoTensor as weight"),
    ]
    for call, message in calls:
        with pytest.raises(ConfigError, match=re.escape(message)):
            linear_cross_entropy(*call)


def test_a_label_out_of_range_is_nan_where_nobody_looks() -> None:
    """On a device, where looking would wait for it."""
    hidden, weight, _, labels = tensors()
    with patch.object(losses.TokenLosses, "check_labels"):
        labels[1, 1] = WORDS
        assert linear_cross_entropy(hidden, weight, labels).isnan()


def test_the_dispatch_leaves_modes_and_inference_as_they_are(streams: Streams) -> None:
    model = Words()
    with streams.optimizer(model, tuning=tuning(units=UNITS)), torch.inference_mode():
        assert model(*words_of(0)).is_inference()


def test_a_plan_counts_what_an_output_layer_keeps_for_the_backward() -> None:
    def planned(kind: str, is_fused: bool, **options: Any) -> int:
        model = Words(kind)
        if is_fused:
            model.head.__class__ = LossLinear
        return plan_of(model, direct=True, param_tier="cpu", **options).place().device_bytes

    for kind in ("no bias", "tied"):
        assert planned(kind, True) - planned(kind, False) == 4096  # fp32 sums, in whole pages
    assert planned("frozen", True) == planned("frozen", False)
    in_tiles = {"tuning": tuning(tile=200)}  # whose gradients are not made in the forward
    assert planned("no bias", True, **in_tiles) == planned("no bias", False, **in_tiles)


PEAK = """
import sys
from pathlib import Path
import torch
import torch.nn.functional as F
from offload import OffloadZero, linear_cross_entropy
from offload.model.loss import bytes_in_chunks
torch.set_num_threads(1)

def status(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024

def loss_of(hidden, head, labels):
    if sys.argv[1] == "plain":
        return F.cross_entropy(head(hidden).float(), labels)
    return linear_cross_entropy(hidden, head, labels)

def run(tokens, words, width=64):
    hidden = torch.randn(tokens, width, requires_grad=True)
    model = torch.nn.Linear(width, words, bias=False)
    labels = torch.randint(words, (tokens,))
    held = sys.argv[2] != "plain"
    if held:
        optimizer = OffloadZero(model, param_tier=sys.argv[2], compute_dtype=torch.float32)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("RssAnon")
    loss_of(hidden, model, labels).backward()
    return status("VmHWM") - status("RssFile") - status("RssShmem") - before

run(8, 16)  # what torch itself needs
print(run(2048, 16000), bytes_in_chunks(2048, 16000, 64, torch.float32, trains_head=True))
"""


@pytest.mark.parametrize("where", often(["plain", "device", "cpu"], "cpu"))
def test_the_peak_is_a_fraction_of_that_of_all_logits(where: str) -> None:
    """2,048 tokens by 16,000 words: the logits alone are 125 MiB."""

    def peak(kind: str) -> list[int]:
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what torch frees goes back at once
        command = [sys.executable, "-c", PEAK, kind, where]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return [int(word) for word in ended.stdout.split()]

    grown, planned = peak("ours")
    assert planned / 2 <= grown <= planned + (4 << 20) <= 50 << 20
    assert where != "plain" or peak("plain")[0] >= 250 << 20
