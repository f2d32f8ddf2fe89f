import io
from typing import Any

import pytest
from rich.console import Console

from offload.cli.progress import progress, training_status

STATS = {
    "nvme_read_bytes": 1 << 30,
    "nvme_written_bytes": 1 << 30,
    "device_to_host_bytes": 0,
    "host_to_device_bytes": 0,
}


def shown(steps: int, **options: Any) -> str:
    """What a run of `steps` steps writes to a console made with `options`."""
    file = io.StringIO()
    with progress(Console(file=file, **options), "step", steps) as tell:
        for done in range(1, steps + 1):
            tell(done, training_status(2.5, 1234.5, STATS))
    return file.getvalue()


@pytest.mark.parametrize(
    ("more", "moved"),
    [
        ({}, "moved 2 GiB (disk)"),
        ({"device_to_host_bytes": 1000, "host_to_device_bytes": 24}, "moved 2 GiB (disk), 1 KiB (device)"),
        (dict.fromkeys(STATS, 0), "all in RAM"),
    ],
)
def test_tiers_that_moved_are_named(more: dict[str, int], moved: str) -> None:
    assert training_status(2.5, 1234.5, STATS | more) == f"loss 2.500  1,234 tokens/s  {moved}"


def test_a_terminal_gets_a_bar_that_fits_80_columns() -> None:
    written = shown(3, force_terminal=True, width=80, color_system=None)
    assert "loss 2.500  1,234 tokens/s  moved 2 GiB (disk)" in written
    assert "3/3" in written
    assert "…" not in written


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (3, 3), (40, 21), (1000, 21), (1007, 22)])
def test_elsewhere_there_are_about_20_plain_lines_with_the_first_and_last_step(steps: int, lines: int) -> None:
    written = shown(steps, width=40).splitlines()  # narrow: lines are not wrapped
    assert len(written) == lines
    assert written[0] == f"step 1/{steps}  loss 2.500  1,234 tokens/s  moved 2 GiB (disk)"
    assert written[-1].startswith(f"step {steps}/{steps} ")


def test_bar_gives_the_cursor_back_after_an_interrupt() -> None:
    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt), progress(Console(file=file, force_terminal=True), "step", 3):
        raise KeyboardInterrupt
    assert file.getvalue().endswith("\x1b[?25h")
