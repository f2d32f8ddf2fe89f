from pathlib import Path

import pytest
from matplotlib import figure
from matplotlib.figure import Figure

from offload.cli import plots
from offload.cli.plots import loss_curve
from offload.errors import ConfigError


def test_loss_curve_names_its_axes_units_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figure, "Figure", lambda **options: drawn.append(Figure(**options)) or drawn[-1])
    loss_curve(tmp_path / "a.png", "GPT tiny on nvme", [5.5, 4.0, 3.0], [(0, 5.6), (3, 3.2)])
    (axes,) = drawn[0].axes
    assert axes.get_title() == "GPT tiny on nvme"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer steps done", "loss (nats per byte)")
    train, validation = axes.lines
    # A step's loss is of the parameters before its update: the first one belongs to 0 steps done.
    assert list(train.get_xdata()) == [0, 1, 2]
    assert list(validation.get_xydata().ravel()) == [0, 5.6, 3, 3.2]
    assert {text.get_text() for text in axes.texts} == {"5.60", "3.20"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_run_of_one_step_can_be_drawn(tmp_path: Path) -> None:
    loss_curve(tmp_path / "a.png", "one", [5.5], [(0, 5.6), (1, 5.0)])
    assert (tmp_path / "a.png").exists()


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib$"):
        loss_curve(tmp_path / "a.png", "one", [5.5], [(0, 5.6), (1, 5.0)])
