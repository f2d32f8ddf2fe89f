"""Pages, scripts and requirements of docs/recipes agree; tests/peers/test_recipes.py runs the scripts."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import torch

from bench import recipes
from bench.recipes import PAGES, RECIPES

ROOT = Path(__file__).parent.parent
SHARED = {"twin", "toys"}
OF_TIMM = {"vit"}
"""What they need is in the extra `vision`."""


def test_each_recipe_has_a_script_a_page_and_a_row() -> None:
    assert {path.stem for path in PAGES.glob("*.py")} == {*RECIPES, *SHARED}
    assert {path.stem for path in PAGES.glob("*.md")} == {*RECIPES, "README"}
    rows = re.findall(r"^\| \[(.+)\]\((\w+)\.md\) \| `(\w+)` \|$", (PAGES / "README.md").read_text(), re.MULTILINE)
    assert [name for _, _, name in rows] == list(RECIPES)
    for title, page, name in rows:
        assert page == name
        assert (PAGES / f"{page}.md").read_text().startswith(f"# {title}\n")


def test_one_extra_has_what_the_scripts_import() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = (ROOT / "constraints.txt").read_text()
    for name, recipe in RECIPES.items():
        extra = extras["vision" if name in OF_TIMM else "recipes"]
        for package in recipe.needs:
            assert any(re.match(rf"{package}\W", line) for line in extra), (name, package)
            assert re.search(rf"^{package}==", pinned, re.MULTILINE), package


@pytest.mark.parametrize("name", RECIPES)
def test_a_script_imports_what_it_is_said_to_need_and_has_a_twin(name: str) -> None:
    tree = ast.parse((PAGES / f"{name}.py").read_text())
    imported = {one.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    imported |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - {*RECIPES[name].needs, *SHARED} <= {"torch", "offload", "datasets", *STANDARD}
    assert {"twin", "offload"} <= imported
    assert "twin.PLAIN" in ast.unparse(tree)


STANDARD = {"collections", "copy", "math", "os", "pathlib", "typing"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_page_says_bytes_on_each_tier_seconds_and_what_was_measured(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    written = page.partition(recipes.BEGINS)[2].partition(recipes.ENDS)[0]
    assert f"```\n{recipes.command_of(RECIPES[name])}\n```" in written
    heading, _, *rows = (re.split(r" *\| *", line)[1:-1] for line in written.splitlines() if line.startswith("|"))
    assert heading == ["", "device", "RAM", "disk", "disk moves a step", "a step"]
    assert rows[0][0] == f"{RECIPES[name].real}, planned"
    assert all(re.fullmatch(r"[\d.,]+ ([KMGTP]i)?B", cell) for cell in rows[0][1:5])
    assert re.fullmatch(r"[\d.e+]+ s, predicted", rows[0][5])
    assert [row[0] for row in rows[1:]] == ["the script, measured"]
    assert re.search(r"have the bits of|apart from", written)
    assert f"make recipes ARGS={name}" in page


def test_a_difference_in_one_bit_is_found() -> None:
    one = torch.tensor([[1.0, -4.0], [2.0, 0.5]])
    other = one.clone()
    other[1, 1] = torch.nextafter(other[1, 1], torch.tensor(1.0))
    assert recipes.apart(one, one.clone()) == 0.0
    assert recipes.apart(other, one) == 2.0**-24 / 4
    assert recipes.apart(other - 1e30, one) > 1
    assert recipes.apart(torch.full((2,), 0.5), torch.zeros(2)) == 0.5


def test_what_is_nan_is_never_near() -> None:
    one, wrong = torch.ones(2), torch.tensor([1.0, torch.nan])
    for pair in ((wrong, one), (one, wrong), (wrong, wrong.clone()), (one, torch.ones(1, 2))):
        assert max(0.1, recipes.apart(*pair)) > 1


def test_figures_take_the_place_of_older_ones_only() -> None:
    page = f"# It\n\n{recipes.BEGINS}\nold\n{recipes.ENDS}\n\nmore\n"
    assert recipes.written(page, "new") == page.replace("old", "new")


def test_a_plan_of_today_takes_the_place_of_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES["lightning_module"]
    monkeypatch.setattr(recipes, "planned_row", lambda _: "| a GPT, planned | 2 B |")
    page = "| a GPT, planned | 1 B |\n| the script, measured | 3 B |\n```\noffload plan --old\n```\n"
    new = page.replace("1 B", "2 B").replace("offload plan --old", recipes.command_of(recipe))
    assert recipes.replanned(page, recipe) == new
