"""`optimizer.generating()`: units that stay from one token of a text to the next. The oracle is a plain model."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning, build
from offload.demo.gpt import GPT, GPTConfig
from offload.interrupts import uninterrupted
from offload.model.generation import TOKENS
from offload.model.unit import Presence
from tests.support.interrupted import interrupted_at

BLOCKS, FEW = 4, 3
TUNING = Tuning(chunk="4KiB", threads=1)
PROMPT = torch.tensor([65, 66])
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"tier": "nvme"},
    "cpu": {"param_tier": "cpu"},
    "nvme": {"param_tier": "nvme"},
    "fetched ahead": {"param_tier": "cpu", "tuning": Tuning(chunk="4KiB", threads=1, prefetch_units=1)},
    "some stay": {"param_tier": "cpu", "device_memory": "190KiB"},
    "frozen": {"param_tier": "nvme"},
    "tiles": {"param_tier": "cpu", "tuning": Tuning(chunk="4KiB", threads=1, tile="4KiB")},
}


def gpt(blocks: int = BLOCKS, *, is_frozen: bool = False) -> GPT:
    model = GPT(GPTConfig(layers=blocks, width=32, heads=2, context=8, tied_head=True))
    model.blocks[:2].requires_grad_(not is_frozen)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of which a held model has torch's bits."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(trained, lr=0.5, momentum=0.9)


def hold(model: GPT, place: str, path: Path) -> OffloadZero:
    return OffloadZero(model, sgd(model), **{"path": path, "tuning": TUNING} | PLACES[place] | IN_FP32)


IN_FP32: dict[str, Any] = {"compute_dtype": torch.float32, "commit_every": None}


def decoded(model: GPT) -> tuple[Tensor, Tensor]:
    """A greedy answer, and the logits of the last token."""
    answer = model.generate(PROMPT, FEW, temperature=0)
    with torch.no_grad():
        return answer, model(answer[None])[0]


def step(model: Any, optimizer: Any, number: int) -> Tensor:
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(number))
    loss: Tensor = model(tokens, tokens)[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same(found: Any, expected: Any) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def here(optimizer: OffloadZero) -> list[str]:
    units = optimizer._parts.parameters.units.values()
    return [unit.name for unit in units if unit.slices and unit.presence is not Presence.RELEASED]


@pytest.mark.parametrize("place", PLACES)
def test_a_decode_and_training_have_the_bits_of_plain_torch(place: str, tmp_path: Path) -> None:
    """Outside, inside, and where the training goes on inside; an update is pending when the context is entered."""
    model = gpt(is_frozen=place == "frozen")
    plain = copy.deepcopy(model)
    other = sgd(plain)
    with hold(model, place, tmp_path) as optimizer:
        for number in range(3):
            losses = step(model, optimizer, number), step(plain, other, number)
            outside = decoded(model)
            losses_inside: tuple[Tensor, ...] = ()
            step(model, optimizer, 9 + number)
            step(plain, other, 9 + number)
            with optimizer.generating():
                inside = decoded(model)
                if number == 1:
                    losses_inside = step(model, optimizer, 7), step(plain, other, 7)
                    inside = decoded(model)
            expected = decoded(plain)
            if place == "tiles":  # whose sums over tiles are rounded otherwise
                torch.testing.assert_close(inside[1], expected[1], rtol=1e-3, atol=1e-4)
                continue
            assert_same((*inside, losses[0], *losses_inside[:1]), (*expected, losses[1], *losses_inside[1:]))
            assert not torch.equal(outside[1], inside[1]), "a step was made between"
            if number == 2 and "device_memory" in PLACES[place]:
                assert optimizer.stats()["peak_device_bytes"] <= 190 * 1024
        for one, twin in zip(model.parameters(), plain.parameters(), strict=True):
            assert place == "tiles" or torch.equal(one, twin)


def unit_bytes(optimizer: OffloadZero, name: str) -> int:
    return sum(flat.numel * flat.dtype.itemsize for flat in optimizer._parts.parameters.units[name].flats)


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
@pytest.mark.parametrize(("free", "kept"), [(0, 0), (1, 1), (2, BLOCKS)])
def test_what_there_is_room_for_comes_once(
    param_tier: str, free: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two units are there at once in any case, so room for two more is room for all four."""
    model = gpt()
    with hold(model, param_tier, tmp_path) as optimizer:
        block, root = unit_bytes(optimizer, "blocks.0"), unit_bytes(optimizer, "")
        planned = optimizer._placement.device_bytes
        room = free * optimizer._parts.parameters.units["blocks.0"].nbytes
        monkeypatch.setattr(build, "_free_on_device", lambda *_: 2 * room)
        moved, before = [], optimizer.stats()["gathered_bytes"]

        def token() -> None:
            nonlocal before
            model.generate(PROMPT, 1, temperature=0)
            now = optimizer.stats()["gathered_bytes"]
            moved.append(now - before)
            before = now

        for _ in range(2):
            token()
            with optimizer.generating():
                for _ in range(3):
                    token()
                    assert len([name for name in here(optimizer) if name]) == kept
            assert here(optimizer) == []
        later = (BLOCKS - kept) * block
        assert moved == 2 * [root + BLOCKS * block, root + BLOCKS * block, later, later]
        stats = optimizer.stats()
        assert stats["generating_units"] == kept + 1
        assert kept * block + root <= stats["generating_bytes"] <= (kept + 2) * block + root
        assert stats["peak_device_bytes"] <= planned + room


def test_what_was_kept_leaves_after_an_exception_and_after_the_outermost_context(tmp_path: Path) -> None:
    model = gpt()
    expected = decoded(copy.deepcopy(model))
    with hold(model, "cpu", tmp_path) as optimizer:
        for error in (ValueError, KeyboardInterrupt):

            def fails(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            with suppress(ValueError, KeyboardInterrupt), optimizer.generating():
                decoded(model)
                handle = model.blocks[2].qkv.register_forward_hook(fails)
                try:
                    decoded(model)
                finally:
                    handle.remove()
            assert here(optimizer) == [], error
            assert_same(decoded(model), expected)
        with optimizer.generating():
            with optimizer.generating():
                decoded(model)
            assert len(here(optimizer)) == BLOCKS + 1
            assert_same(decoded(model), expected)
        assert here(optimizer) == []


def test_writes_count_and_what_is_gathered_is_there_for_as_long_as_it_is(tmp_path: Path) -> None:
    model = gpt()
    plain = copy.deepcopy(model)
    with hold(model, "nvme", tmp_path) as optimizer:
        gathered = optimizer.gathered(model.blocks[1])
        with optimizer.generating():
            decoded(model)
            gathered.__enter__()
            for one in (model, plain):
                with torch.no_grad():
                    one.blocks[1].qkv.weight.mul_(2)
                    one.head.weight.add_(0.01)
            assert_same(decoded(model), decoded(plain))
        assert here(optimizer) == ["blocks.1"]
        gathered.__exit__(None, None, None)
        assert here(optimizer) == []
        assert_same(decoded(model), decoded(plain))


@pytest.mark.parametrize("fits", [True, False])
def test_a_run_may_be_closed_inside(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt()
    expected = decoded(copy.deepcopy(model))
    optimizer = hold(model, "cpu", tmp_path)
    with optimizer.generating():
        decoded(model)
        with torch.no_grad():
            model.blocks[0].qkv.weight.add_(0)
        if not fits:
            monkeypatch.setattr(build, "_free_on_device", lambda *_: 0)
        optimizer.close()
    if fits:
        assert_same(decoded(model), expected)


def test_the_warning_says_what_would_let_more_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is said where only the first token moves something."""
    model = gpt()
    with hold(model, "cpu", tmp_path) as optimizer:
        with optimizer.generating():
            model.generate(PROMPT, 2 * TOKENS, temperature=0)
        monkeypatch.setattr(build, "_free_on_device", lambda *_: 0)
        token(model)
        with optimizer.generating(), pytest.warns(UserWarning, match="more units stay if you give more device_memory"):
            model.generate(PROMPT, TOKENS + 1, temperature=0)


@pytest.mark.parametrize("when", ["it is entered", "it is left"])
def test_an_interrupt_while(when: str, tmp_path: Path) -> None:
    """At every eleventh place."""
    model = gpt()
    expected = decoded(copy.deepcopy(model))
    with hold(model, "cpu", tmp_path) as optimizer:
        units = [unit for unit in optimizer._parts.parameters.units.values() if unit.slices]

        def is_interrupted(place: int) -> bool:
            context, is_left = optimizer.generating(), when == "it is left"
            if is_left:
                context.__enter__()
                token(model)
            begins = False
            try:
                with interrupted_at(place):
                    nothing()  # from here on a handler defers signals
                    begins = True
                    context.__exit__(None, None, None) if is_left else context.__enter__()
            except KeyboardInterrupt:
                if is_left and not begins:
                    context.__exit__(None, None, None)
                return True
            if not is_left:
                context.__exit__(None, None, None)
            return False

        place = 1
        while is_interrupted(place):
            token(model)
            assert not any(unit.stays for unit in units), place
            assert here(optimizer) == [], place
            place += 11
        assert place > 100
        assert_same(decoded(model), expected)
        assert here(optimizer) == []


@uninterrupted
def nothing() -> None:
    pass


@torch.no_grad()
def token(model: GPT) -> None:
    """As many may be computed as one likes: no function of that name calls it."""
    model(PROMPT[None])
