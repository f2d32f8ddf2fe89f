"""A recipe has the losses and weights of its twin in plain torch, as `make recipes` compares them."""

from __future__ import annotations

import pytest

from bench import recipes
from bench.recipes import RECIPES

pytestmark = [pytest.mark.peers, pytest.mark.timeout(2 * recipes.LIMIT_S)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_what_plain_torch_has(name: str) -> None:
    lacks = recipes.missing(RECIPES[name])
    if lacks:
        pytest.skip(lacks)
    found = recipes.compare(name)
    assert found.difference <= RECIPES[name].bound
    assert found.tiers["disk"] > 0
    page = (recipes.PAGES / f"{name}.md").read_text().splitlines()
    assert recipes.measured_row(found) in page, f"make recipes ARGS='{name} --write'"


@pytest.mark.parametrize("name", RECIPES)
def test_a_page_has_what_offload_plan_says(name: str) -> None:
    """`make recipes ARGS=--plan` writes it anew."""
    pytest.importorskip("transformers")
    page = (recipes.PAGES / f"{name}.md").read_text()
    assert recipes.replanned(page, RECIPES[name]) == page
