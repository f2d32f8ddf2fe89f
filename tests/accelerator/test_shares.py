"""Shares of a device's memory: what is used of it, what is said when some is left over, and when it is not enough.

The oracle: what the allocator of the simulated accelerator counts, and plain runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.sizes import parse_bytes
from tests import simulated_device
from tests.support.scripts import run_code

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

DEVICE = torch.device("simulated:0") if simulated_device.is_wanted() else torch.device("cpu")
MIB = 1 << 20
BLOCKS, WIDTH, ROWS = 8, 512, 256
SMALL = Tuning(chunk="256KiB")
FIGURE = re.compile(r'device_memory(?:=| to )"([^"]+)"')
"""Of what a line or note says to give."""


def blocks(count: int = BLOCKS) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


@contextmanager
def a_device_of(nbytes: int) -> Iterator[None]:
    """The device has so much memory beside what other tests have left there, and its peak begins anew."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    with simulated_device.memory_limit(torch.accelerator.memory_reserved(DEVICE) + nbytes):
        yield


def trained(model: nn.Module, steps: int = 5, rows: int = ROWS, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of a short training, and its stats."""
    losses = []
    x = torch.linspace(-1, 1, rows * WIDTH, dtype=torch.bfloat16).view(rows, WIDTH).to(DEVICE)
    with OffloadZero(model, device=DEVICE, tuning=SMALL, **options) as optimizer:
        for _ in range(steps):
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, optimizer.stats()


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_the_figure_said_after_the_first_steps_uses_what_was_left_over(
    param_tier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(DEVICE)
    with a_device_of(40 * MIB):
        expected, stats = trained(blocks().to(DEVICE), param_tier=param_tier)
        lines = [line for line in capsys.readouterr().err.splitlines() if "unused" in line]
        assert len(lines) == 1
        figure = FIGURE.search(lines[0])
        assert figure is not None
        torch.accelerator.empty_cache()
        losses, more = trained(blocks().to(DEVICE), param_tier=param_tier, device_memory=figure[1])
        taken = torch.accelerator.memory_stats(DEVICE)["allocated_bytes.all.peak"] - before
    assert losses == expected
    assert "unused" not in capsys.readouterr().err
    assert stats["device_chunks"] == 0
    if param_tier == "device":
        assert 0 < more["device_chunks"] < more["chunks"]
        assert taken >= 0.85 * 40 * MIB, "it used what was left over"
    else:
        assert "8 streamed units would stay there (now 0)" in lines[0]
        assert more["gathered_bytes"] < stats["gathered_bytes"] / 1.5


def test_where_nothing_more_would_stay_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with a_device_of(128 * MIB):
        trained(blocks(), steps=4, tier="device")
        trained(blocks(), steps=4, device_memory="100MiB")
        trained(blocks(), steps=4, device_memory="100MiB", param_tier="cpu")
    assert "unused" not in capsys.readouterr().err


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_what_an_out_of_memory_error_says_to_lower_is_enough(param_tier: str) -> None:
    options: dict[str, Any] = {"steps": 2, "rows": 2 * ROWS, "param_tier": param_tier}
    expected, _ = trained(blocks(12), **options)
    memory, figures = 55 * MIB if param_tier == "device" else 8 * MIB, []
    with a_device_of(60 * MIB if param_tier == "device" else 18 * MIB):
        for _ in range(3):
            try:
                losses, stats = trained(blocks(12), device_memory=memory, **options)
                break
            except torch.OutOfMemoryError as error:
                (note,) = error.__notes__
                figure = FIGURE.search(note)
                assert figure is not None, note
                figures.append(figure[1])
                memory = parse_bytes(figure[1], "device_memory")
        else:
            pytest.fail(f"not enough: {figures}")
    assert losses == expected
    assert len(figures) == 1
    assert stats["device_chunks"] == (50 if param_tier == "device" else 0)


def failed_backward(model: nn.Module) -> torch.OutOfMemoryError:
    """What a backward raises that gets no memory."""
    loss = model(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, device=DEVICE)).float().square().mean()
    simulated_device.fail_allocation(1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        loss.backward()
    simulated_device.fail_allocation(0)
    assert not hasattr(raised.value, "__notes__")
    return raised.value


def test_what_a_backward_raised_is_explained_when_the_loop_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    model = blocks()
    with OffloadZero(model, device=DEVICE, tuning=SMALL, device_memory="20MiB") as optimizer:
        optimizer.zero_grad()
        assert "out of memory" not in capsys.readouterr().err
        failed_backward(model)
        optimizer.zero_grad()
        optimizer.zero_grad()
        said = capsys.readouterr().err
    assert said.count("offload: torch ran out of memory") == 1
    assert "chunks of optimizer states would stay there (now 15)" in said
    assert "out of memory" not in capsys.readouterr().err


@pytest.mark.parametrize("allocation", [1, 5])
def test_what_a_forward_raises_has_a_note(allocation: int) -> None:
    model, x = blocks(), torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    with OffloadZero(model, device=DEVICE, tuning=SMALL, param_tier="cpu"):
        simulated_device.fail_allocation(allocation)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model(x)
        assert len(raised.value.__notes__) == 1
        assert raised.value.__notes__[0].startswith("offload: torch ran out of memory")


def test_what_leaves_the_optimizers_block_gets_a_note() -> None:
    model = blocks()
    with pytest.raises(torch.OutOfMemoryError) as raised, OffloadZero(model, device=DEVICE, tuning=SMALL):
        raise failed_backward(model)
    (note,) = raised.value.__notes__
    assert note.endswith('give a smaller micro-batch with accumulation, or activation_tier="cpu", or param_tier="cpu"')
    with pytest.raises(ValueError, match="other") as other, OffloadZero(blocks(), device=DEVICE, tuning=SMALL):
        raise ValueError("another")
    assert not hasattr(other.value, "__notes__")


ENDS = """
import torch
from tests import simulated_device
from tests.support import models
from tests.support.device import load_simulated
load_simulated()
from offload import OffloadZero
model = models.build("mlp").to("simulated")
optimizer = OffloadZero(model, tier="device")
loss = next(models.losses("mlp", model, "simulated"))()
simulated_device.fail_allocation(1)
loss.backward()
"""


def test_a_process_that_ends_by_it_says_so_last() -> None:
    done = run_code(ENDS)
    assert "OutOfMemoryError: simulated accelerator out of memory" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("offload: torch ran out of memory: of ")
    assert last.endswith('tier="cpu"')
