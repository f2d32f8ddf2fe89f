"""The states of a unit, against a table written by hand, and what a transition that fails half-way leaves."""

from __future__ import annotations

import errno

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import OffloadZero, Tuning
from offload.errors import StateError, TierIOError
from offload.layout import Layout, ParamSpec, build
from offload.model.unit import Presence, Unit, Units
from tests.support.toy import Net, batch, squares, take_step

CALLS = ["fetch", "expect_update", "arrive", "release"]
# What each call makes of each state; what is not listed is refused.
EXPECTED = {
    ("released", "fetch"): "being fetched",
    ("released", "expect_update"): "being updated",
    ("being updated", "fetch"): "being fetched",
    ("being updated", "release"): "released",
    ("being fetched", "arrive"): "available",
    ("being fetched", "release"): "released",
    ("available", "release"): "released",
}


def layout() -> Layout:
    """A root of one parameter, a block of three in two dtypes, and a weight in tiles."""
    bf16, fp32 = torch.bfloat16, torch.float32
    specs = [
        ParamSpec("embed", 300, "", bf16, 0),
        ParamSpec("block.up", 5000, "block", bf16, 0),
        ParamSpec("block.norm", 7, "block", fp32, 0),
        ParamSpec("block.down", 11, "block", bf16, 0),
        ParamSpec("head", 4000, "head", bf16, 0, tile=1500),
    ]
    return build(specs, 1024)


@given(st.lists(st.sampled_from(CALLS), max_size=40))
def test_a_unit_goes_through_the_states_of_the_table_and_no_others(calls: list[str]) -> None:
    unit, state = Units(layout(), range(5))["block"], "released"
    for call in calls:
        after = EXPECTED.get((state, call))
        if after is None:
            with pytest.raises(StateError, match=f"block is {state} and cannot become"):
                getattr(unit, call)()
        else:
            getattr(unit, call)()
            state = after
        assert unit.presence.value == state
        assert unit.is_here is (state == "available")
        assert unit.is_coming is (state in ("being fetched", "being updated"))
        assert unit.is_missing is (state in ("released", "being updated"))
        assert (not unit.not_updated) or state == "being updated"


def test_a_unit_knows_its_parameters_chunks_and_bytes() -> None:
    made = layout()
    units = Units(made, range(5))
    block = units["block"]
    assert [made.specs[number].name for number in block.params] == ["block.up", "block.down", "block.norm"]
    assert block.params == block.streamed
    assert block.watched == set(block.params)
    # 1,024 elements of a master fill a chunk; each flat parameter begins a new one.
    assert [len(chunks) for chunks in block.chunks.values()] == [5, 1]
    # Parameters begin at multiples of 64 elements, flat parameters at multiples of 256 bytes.
    assert block.nbytes == 2 * (5056 + 11) + 106 + 4 * 7
    head, last = units["head"], units["head[2]"]
    assert head.nbytes == 2 * made.flats[head.flats[0].index].numel
    assert Units(made, range(5), in_ram=("head",))["head"].nbytes == 0, "the device has no room for it as a whole"
    assert not head.watched
    assert last.home is head
    assert last.nbytes == 2 * 1000
    assert not last.params
    assert block.home is block
    assert units[""].encloses(block)
    assert not block.encloses(units[""])


def test_what_does_not_stream_is_always_there() -> None:
    unit = Units(layout(), ())["block"]
    assert unit.is_here
    for call in CALLS:
        with pytest.raises(StateError):
            getattr(unit, call)()
    assert Units(layout(), ())["elsewhere"].is_here


def test_a_disk_that_fails_while_an_updated_unit_is_fetched_leaves_no_unit_with_a_part_of_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its update brings the values of its trained flat parameter; those of its frozen one are read."""
    torch.manual_seed(1)
    plain, model = Net(), Net()
    plain.load_state_dict(model.state_dict())
    tuning = Tuning(chunk="4KiB", prefetch_units=0, threads=1)
    for net in (plain, model):
        net.blocks[1].up.weight.requires_grad_(False)
    with OffloadZero(plain, tier="cpu", tuning=tuning) as finished:
        take_step(finished, squares(plain))
        take_step(finished, squares(plain))
    with OffloadZero(model, tier="cpu", param_tier="cpu", tuning=tuning) as optimizer:
        take_step(optimizer, squares(model))
        squares(model).backward()
        optimizer.step()
        transfers, unit = optimizer._held.units.transfers, optimizer._held.units.named("blocks.1")
        transfers.begin_update(unit)
        optimizer._held.pending.apply(unit)
        assert unit.presence is Presence.UPDATING
        assert unit.not_updated, "those of the frozen one"
        start = transfers._start_copy

        def fails(*args: object) -> None:
            raise TierIOError("read", errno.EIO, "swap", 0, 0, "a test's disk")

        monkeypatch.setattr(transfers, "_start_copy", fails)
        with pytest.raises(TierIOError):
            transfers.fetch(unit)
        assert unit.presence is Presence.RELEASED
        monkeypatch.setattr(transfers, "_start_copy", start)
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param, expected), name
        assert torch.equal(model(batch(0)), plain(batch(0).bfloat16()))


def test_a_fetch_that_is_cut_off_as_soon_as_it_began_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what another thread throws in, which may come between any two instructions."""
    torch.manual_seed(1)
    model = Net().bfloat16()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    with OffloadZero(model, tier="cpu", param_tier="cpu", tuning=Tuning(chunk="4KiB", threads=1)) as optimizer:
        transfers, unit = optimizer._held.units.transfers, optimizer._held.units.named("blocks.1")
        fetch = Unit.fetch

        def cut_off(self: Unit) -> None:
            fetch(self)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Unit, "fetch", cut_off)
            with pytest.raises(KeyboardInterrupt):
                transfers.fetch(unit)
        assert unit.presence is Presence.RELEASED
        assert unit not in transfers.with_memory
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name]), name
