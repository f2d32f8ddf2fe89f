"""Documents keep their word: every Python example runs as it stands, links lead somewhere, paths in them exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning, errors
from tests.test_rooms import FLOORS, sources

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_EXAMPLES = [document for document in DOCUMENTS if document.stem != "one-step"]
"""Those for users."""
BATCHES = 60
"""Enough for the commits that the examples make."""


class Model(nn.Module):
    """What the documents call `model`: blocks, a head, and an output with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = torch.relu(block(x))
        return SimpleNamespace(loss=nn.functional.mse_loss(self.head(x).float(), y))


def examples() -> Iterator[Any]:
    """The fenced Python blocks of the documents that have them, by document and line."""
    for document in WITH_EXAMPLES:
        source = document.read_text()
        for found in re.finditer(r"^```python\n(.*?)^```$", source, re.MULTILINE | re.DOTALL):
            line = source[: found.start()].count("\n") + 1
            yield pytest.param(found[1], id=f"{document.stem}-line-{line}")


def runs(code: str, scratch: Path) -> None:
    """Runs an example with a tiny model. Args: scratch: takes the place of /scratch in it."""
    torch.manual_seed(0)
    model = Model()
    names: dict[str, Any] = {
        "build_model": lambda: model,
        "model": model,
        "step": 1,
        "writer": SimpleNamespace(add_scalar=lambda name, value, step: None),
        "wandb": SimpleNamespace(log=lambda values, step: None),
        "loader": [{"x": torch.randn(3, 8), "y": torch.randn(3, 1)} for _ in range(BATCHES)],
    }
    if "OffloadZero(" not in code:
        names["optimizer"] = OffloadZero(model)
    try:
        exec(compile(code.replace('"/scratch', f'"{scratch}'), "example", "exec"), names)
    finally:
        names.get("optimizer", SimpleNamespace(close=lambda: None)).close()


@pytest.mark.parametrize("code", list(examples()))
def test_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs(code, tmp_path)
    if 'resume="auto"' in code:
        runs(code, tmp_path)  # goes on from what the first run committed


def test_every_option_is_named() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    parameters = inspect.signature(OffloadZero.__init__).parameters.values()
    options = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert options | {field.name for field in fields(Tuning)} <= named


def test_every_error_is_named_once_as_in_its_module() -> None:
    page = (ROOT / "docs" / "errors.md").read_text().split("\n## ")[0]
    kinds = [
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__
    ]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == kinds[1:]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(document: Path) -> set[str]:
    """The names that its headings have in links."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_are_named_exist(document: Path) -> None:
    """`offload/...`, `tests/...` and the like, in backquotes."""
    named = re.findall(r"`((?:offload|tests|bench|docs|kernels)/[\w./]+)`", document.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_stations_of_a_step_exist() -> None:
    """Each row of one-step.md names a file and a function that is in it."""
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", (ROOT / "docs" / "one-step.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    assert not [f"{file}: {function}" for file, function in rows if function not in functions(ROOT / file)]


def test_the_table_of_rooms_is_in_the_order_of_imports() -> None:
    page = (ROOT / "docs" / "development.md").read_text().split("## Rooms")[1].split("## Words")[0]
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    named = [name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    rooms = {room for room, _ in sources()}
    assert named == [*(room for floor in reversed(FLOORS) for room in reversed(floor) if room in rooms), "kernels"]


def functions(file: Path) -> set[str]:
    """The functions and methods that a file defines, methods with their class."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", sorted((ROOT / "bench" / "results").glob("*.md")), ids=lambda page: page.stem)
def test_figures_are_of_a_script_that_exists_or_the_page_says_that_it_is_gone(page: Path) -> None:
    text = page.read_text()
    scripts = set(re.findall(r"`python (bench/\w+\.py)", text))
    gone = {script for script in scripts if not (ROOT / script).exists()}
    assert scripts
    assert gone <= set(re.findall(r"(bench/\w+\.py)[^`]*` is gone since", text))
