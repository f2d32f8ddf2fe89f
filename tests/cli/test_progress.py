import io
from typing import Any

import pytest
from rich.console import Console

from offload.cli.progress import Bar, Lines, moved, progress

STATS = {
    "nvme_read_bytes": 1 << 30,
    "nvme_written_bytes": 1 << 30,
    "device_to_host_bytes": 0,
    "host_to_device_bytes": 0,
}


def shown(steps: int, **options: Any) -> str:
    """What a run of `steps` steps writes to a console made with `options`."""
    file = io.StringIO()
    with progress(Console(file=file, **options), steps) as told:
        for done in range(1, steps + 1):
            told.step(done, 2.5, 1234.5, STATS)
    return file.getvalue()


def test_tiers_that_moved_are_named() -> None:
    assert moved(STATS) == "nvme 2 GiB"
    assert moved(STATS | {"device_to_host_bytes": 1000, "host_to_device_bytes": 24}) == "nvme 2 GiB, device 1 KiB"
    assert moved(dict.fromkeys(STATS, 0)) == "all in RAM"


def test_a_terminal_gets_a_bar_that_fits_80_columns() -> None:
    assert isinstance(progress(Console(force_terminal=True), 3), Bar)
    written = shown(3, force_terminal=True, width=80, color_system=None)
    assert "loss 2.500  1,234 tokens/s  nvme 2 GiB" in written
    assert "3/3" in written
    assert "…" not in written


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (3, 3), (40, 21), (1000, 21), (1007, 22)])
def test_elsewhere_there_are_about_20_plain_lines_with_the_first_and_last_step(steps: int, lines: int) -> None:
    assert isinstance(progress(Console(file=io.StringIO()), steps), Lines)
    written = shown(steps, width=40).splitlines()  # narrow: lines are not wrapped
    assert len(written) == lines
    assert written[0] == f"step 1/{steps}  loss 2.500  1,234 tokens/s  nvme 2 GiB"
    assert written[-1].startswith(f"step {steps}/{steps} ")


def test_bar_gives_the_cursor_back_after_an_interrupt() -> None:
    file = io.StringIO()
    told = progress(Console(file=file, force_terminal=True), 3)
    with pytest.raises(KeyboardInterrupt), told:
        raise KeyboardInterrupt
    assert file.getvalue().endswith("\x1b[?25h")
