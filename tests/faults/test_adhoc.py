import pytest
from tests.faults.conftest import *
from tests.faults.test_snapshots_and_cuts import KeepingCuts
from tests.faults.test_resharding import LayoutCuts
from tests.faults.test_commits import Cuts, cut_power
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [LayoutCuts, KeepingCuts, Cuts])
def test_x(make, path, kind, seed):
    cut_power(kind(make, path), 60, seed=100+seed)
