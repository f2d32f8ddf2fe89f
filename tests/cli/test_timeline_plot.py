import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import figure
from matplotlib.figure import Figure

from offload.cli.timeline_plot import COLOURS, read_lanes, timeline_picture
from offload.profiling import ADAM, PHASES, WAITS, Timeline


def recorded(file: Path) -> Path:
    timeline = Timeline()
    with timeline.recorded(file):
        with timeline.event(PHASES, "step"), timeline.event(ADAM, "Adam", chunk=0):
            pass
        with timeline.event(WAITS, "wait for bounce", chunk=0, tier="device"):
            pass
        reads = [timeline.begin("drive 0: reads", "read", chunk=chunk, size=1 << 20) for chunk in range(3)]
        for read in reads:
            timeline.end(read)
    return file


def test_lanes_are_rows_with_names_units_and_a_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figure, "Figure", lambda **options: drawn.append(Figure(**options)) or drawn[-1])
    timeline_picture(recorded(tmp_path / "t.json"), tmp_path / "t.png", "GPT tiny")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [PHASES, ADAM, WAITS, "drive 0: reads"]
    assert axes.get_title() == "GPT tiny"
    assert axes.get_xlabel().startswith("time (ms)")
    assert {text.get_text() for text in drawn[0].legends[0].get_texts()} == {"step", "Adam", "other wait", "read"}
    assert any("3 MiB" in text.get_text() for text in axes.texts)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_times_are_milliseconds_and_overlapping_transfers_all_there(tmp_path: Path) -> None:
    lanes = read_lanes(recorded(tmp_path / "t.json"))
    events: list[dict[str, Any]] = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    (adam,) = lanes[ADAM]
    (told,) = [event for event in events if event["name"] == "Adam chunk 0"]
    assert (adam.start, adam.length) == (told["ts"] / 1000, told["dur"] / 1000)
    assert [bar.size for bar in lanes["drive 0: reads"]] == [1 << 20] * 3
    assert {bar.kind for bars in lanes.values() for bar in bars} <= set(COLOURS)


def test_empty_timeline_can_be_drawn(tmp_path: Path) -> None:
    with Timeline().recorded(tmp_path / "t.json"):
        pass
    timeline_picture(tmp_path / "t.json", tmp_path / "t.png", "nothing")
    assert (tmp_path / "t.png").exists()
