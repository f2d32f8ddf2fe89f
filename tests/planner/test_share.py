"""Who gets the next byte of the device: the order that the planner takes, beside the other one, on many machines."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest

from offload.options import Options
from offload.planner.decide import Situation, decide
from offload.planner.share import saved_by_states, saved_by_units, states_come_first

LINKS = (12, 25, 55, 64, 400)
"""GB/s: PCIe 3.0 to 6.0, and the link of a chip with memory of both kinds."""
DISKS = (0.5, 1.5, 3, 6, 12, 28)
"""GB/s: a SATA drive to four of the fastest NVMe drives."""
MACHINES = [(link, disk) for link, disk in product(LINKS, DISKS) if 1.5 * disk <= link]
IN_RAM, ON_DEVICE = (0, 0.5, 0.8), (0.25, 0.5, 1, 2, 4)
"""The share of the states that is in RAM; bytes of the device for each parameter."""


def step_s(link: float, disk: float, micro_batches: int, in_ram: float, room: float, order: str) -> float:
    """What the slowest of disk and link takes for a parameter, counted transfer by transfer.

    Args: order: "states units", or the other way round, as either has room; in_ram: of states; ends with "nvme" if
    parameters are there.
    """
    of_states, left = 12 + (2 if micro_batches == 1 else 4), 1.0 - in_ram
    states = units = 0.0
    for kind in order.split()[:2]:
        if kind == "states":
            states = min(room / of_states, left)
            room -= states * of_states
        else:
            units = min(room / 2, 1.0)
            room -= units * 2
    fetched = 2 * 2 * micro_batches * (1 - units) + 2 * units
    read_and_written = (12 + 12) * (left - states)
    if order.endswith("nvme"):
        read_and_written += fetched - 2  # a forward after the step finds new ones in RAM
    down = 2 * micro_batches * (1 - states) + 2 * states
    return max(read_and_written / disk, fetched / link, down / link)


class Beside(NamedTuple):
    """How an order compares to the other one. Attributes: wins: the share of cases; worst: seconds, at most, to 1."""

    wins: float
    worst: float


def compared(micro_batches: int, params: str, own: str, other: str) -> Beside:
    ratios = [
        step_s(*machine, micro_batches, in_ram, room, f"{own} {params}")
        / step_s(*machine, micro_batches, in_ram, room, f"{other} {params}")
        for machine, in_ram, room in product(MACHINES, IN_RAM, ON_DEVICE)
    ]
    return Beside(sum(ratio <= 1.001 for ratio in ratios) / len(ratios), max(ratios))


@pytest.mark.parametrize("params", ["cpu", "nvme"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_the_order_is_the_better_one_on_nearly_all_machines(micro_batches: int, params: str) -> None:
    options = Options(tier="nvme", path=".", param_tier=params, accumulation=micro_batches)
    choice = decide(options, Situation(trained_bytes=1, frozen_bytes=0))
    is_first = states_come_first(choice)
    assert is_first is (params == "cpu" or micro_batches == 1)
    orders = "states units", "units states"
    own, other = orders if is_first else orders[::-1]
    found, against = compared(micro_batches, params, own, other), compared(micro_batches, params, other, own)
    assert found.wins >= {1: 0.99, 2: 0.99, 4: 0.94, 8: 0.84}[micro_batches]
    assert found.worst <= 2.001, "where links are the slowest, and micro-batches many"
    assert against.worst >= 1.7
    assert found.worst < against.worst


def test_without_a_disk_units_come_first() -> None:
    frozen = Situation(trained_bytes=1, frozen_bytes=1000)
    for options, situation in (
        (Options(tier="cpu", param_tier="cpu"), Situation(trained_bytes=1, frozen_bytes=0)),
        (Options(tier="cpu", param_tier="cpu"), frozen),
        (Options(tier="nvme", path=".", param_tier="nvme"), frozen),
    ):
        assert not states_come_first(decide(options, situation))
    assert states_come_first(decide(Options(tier="nvme", path=".", param_tier="cpu"), frozen))


def test_what_a_byte_saves_is_what_its_parameter_moves() -> None:
    """Of 7 parameters in 3 micro-batches, in bytes."""
    situation = Situation(trained_bytes=1, frozen_bytes=0)
    streamed = decide(Options(tier="nvme", path=".", param_tier="nvme", accumulation=3), situation)
    forwards_and_backwards, new_values = 3 * 2 * (7 * 2), 7 * 2
    assert saved_by_units(streamed).link == (forwards_and_backwards - new_values) / (7 * 2)
    assert saved_by_units(streamed).disk == saved_by_units(streamed).link
    gradients, states, sums = 3 * (7 * 2), 7 * 3 * 4, 7 * 4
    assert saved_by_states(streamed) == (2 * states / (states + sums), (gradients - new_values) / (states + sums))
    by_two_ranks = saved_by_units(streamed, 2)  # which fetch a half each, and have all of a unit that stays
    assert by_two_ranks.link == saved_by_units(streamed).link / 2
    in_slots = decide(Options(tier="nvme", path=".", param_tier="nvme", grad_tier="nvme", accumulation=3), situation)
    written_and_read = 3 * 2 * sums
    assert saved_by_states(in_slots).disk == (2 * states + written_and_read) / (states + sums)
    resident = decide(Options(tier="cpu", param_tier="device", accumulation=3), situation)
    assert saved_by_states(resident) == (0, (gradients + new_values) / (states + sums))
