"""What `offload plan` says of some configurations stays what it was."""

from __future__ import annotations

import json

import pytest

from tests.planner.recorded import PLANS, plan, recorded


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_the_recorded_one(name: str) -> None:
    assert json.loads(json.dumps(plan(name))) == recorded()[name]
