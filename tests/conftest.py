from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Before torch is imported, here and in processes that tests start. Models are tiny: threads of torch's wait for each
# other longer than they work, the more so beside the kernels' own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from hypothesis import settings

from tests import simulated_device
from tests.support import tried
from tests.support.cases import covering
from tests.support.device import DEVICE, load_simulated
from tests.support.late_copier import CopiedBy, copying_by
from tests.support.ranks import Worlds

gc.disable()  # until tests are collected: nearly all that importing them makes stays

if simulated_device.is_wanted():
    load_simulated()  # before the first backward

if DEVICE.startswith("cuda"):
    # The same bits are promised "with torch's own determinism settings fixed": a convolution may add with atomics else.
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False

settings.register_profile("offload", deadline=None)  # machines are shared: how long an example takes says nothing
settings.load_profile("offload")

OF_RANKS = (
    "tests/distributed/",
    "tests/checkpoint/test_stored_runs_of_ranks.py",
    "tests/cli/test_benchmarks.py::test_predict_compares_a_simulated_rank_with_two",
    "tests/planner/test_simulated_ranks.py::test_a_simulated_rank_sends_and_moves",
    "tests/planner/test_simulated_ranks.py::test_steps_that_a_simulated_rank_tries",
    "tests/planner/test_trying.py::test_all_ranks_do",
    "tests/threads/test_beside.py::test_what_needs_all_ranks",
)
"""What uses `worlds`. Whoever runs the first of them starts ranks, which import what they need."""
OWN_RANKS = ("tests/accelerator/", "tests/gpu/", "tests/peers/")
"""Their ranks have devices, or other libraries, and are started by each file."""
SHARING = ("tests/cli/test_plan", "tests/gpu/test_ranks.py", "tests/parity/", "tests/test_rooms.py", "tests/threads/")
"""Where the tests of a file need the same few trainings, measures of a model, or parsed sources, which a process
keeps."""
PRODUCTS = (
    "tests/accelerator/",
    "tests/checkpoint/",
    "tests/cli/",
    "tests/distributed/",
    "tests/faults/",
    "tests/gpu/",
    "tests/model/",
    "tests/native/",
    "tests/optim/",
    "tests/oracle/",
    "tests/parity/",
    "tests/planner/",
    "tests/threads/",
)
"""Where not all combinations of values run in make test: see `covering`."""

DEAR = (
    "tests/distributed/test_device_share.py::test_another_share_over_another_number_of_ranks_goes_on",
    "tests/distributed/test_late.py::test_ranks_that_owe_different_steps_have_the_bits_of_one_process[2-2-cpu]",
    "tests/distributed/test_late.py::test_ranks_that_owe_different_steps_have_the_bits_of_one_process[4-1-cpu]",
    "tests/distributed/test_moved_ranks.py::"
    "test_machines_in_another_order_go_on_with_the_bits_of_those_in_their_own[before1-after1-options1]",
    "tests/distributed/test_resharding.py::test_a_run_goes_on_over_another_number_of_ranks[1, 3, 2-8bit]",
    "tests/distributed/test_tensor_parallel.py::test_frozen_parts_stream_and_what_is_written_to_them_is_committed[4]",
    "tests/distributed/test_whole_parameters.py::test_all_uses_have_the_bits_of_resident_parameters",
    "tests/faults/test_commits.py::test_a_killed_loop_draws_schedules_and_drops_out_as_if_it_had_not_been",
    "tests/faults/test_commits.py::test_power_cuts_lose_nothing_that_was_committed_where_experts_owe_steps",
    "tests/faults/test_commits.py::test_power_cuts_lose_nothing_that_was_committed_where_steps_are_tried",
    "tests/faults/test_given_back.py::test_ctrl_c_anywhere_in_a_construction_gives_the_model_back[streamed from nvme]",
    "tests/faults/test_interrupted_steps.py::test_a_method_is_applied_or_not_or_says_so[streamed]",
    "tests/faults/test_interrupted_steps.py::test_a_step_that_torch_runs_is_made_or_not[SGD-streamed]",
    "tests/faults/test_resharding.py::test_cut_off_at_any_operation_one_of_the_two_commits_is_there[a-ab]",
    "tests/faults/test_resharding.py::test_power_cuts_in_ever_other_layouts_lose_nothing_that_was_committed",
    "tests/faults/test_snapshots.py::test_cut_off_at_every_third_operation_there_is_no_half_snapshot",
    "tests/faults/test_snapshots.py::test_going_back_cut_off_anywhere_leaves_what_was_or_what_is_to_be[run]",
    "tests/faults/test_snapshots_and_cuts.py::test_power_cuts_leave_whole_snapshots",
    "tests/model/test_loss.py::test_the_peak_is_a_fraction_of_that_of_all_logits",
    "tests/oracle/test_frozen.py::"
    "test_idiom_with_frozen_parameters_is_as_in_plain_torch[prompt_tuning-cpu, frozen in tiles from nvme]",
    "tests/parity/test_whole_optimizers.py::"
    "test_a_run_that_goes_on_in_one_place_after_the_other_has_the_bits_of_plain_torch[one class with a flag-1]",
    "tests/planner/test_peak.py::test_the_process_uses_what_the_plan_said[0.0-1-large]",
    "tests/planner/test_trying.py::test_all_ranks_do_what_rank_0_would[1]",
    "tests/test_examples.py::test_example_of_ranks_runs_and_resumes_under_torchrun",
    "tests/threads/test_beside.py::"
    "test_a_thread_that_a_forward_waits_for_reads_all_parameters_there[activations on nvme]",
    "tests/distributed/test_tiles.py::test_a_run_goes_on_with_other_tiles_at_another_stage",
    "tests/distributed/test_whole_optimizers.py::test_a_commit_is_resumed_at_another_number_of_ranks[muon-2-3]",
    "tests/faults/test_commits.py::"
    "test_killed_between_a_backward_that_tries_steps_and_its_step_it_goes_on_with_the_same_bits[1-8bit]",
    "tests/faults/test_interrupted_calls.py::test_an_interrupted_call_leaves_what_was_or_says_so[close]",
    "tests/faults/test_interrupted_steps.py::test_a_step_is_made_or_not[streamed]",
    "tests/faults/test_signals.py::"
    "test_a_handler_that_raises_is_heard_once_and_changes_nothing[streamed-step-in the forward]",
    "tests/io/test_engines.py::test_an_interrupt_anywhere_in_an_engines_life_leaves_no_thread[threads]",
    "tests/model/test_tiling.py::test_gradients_of_tiles_and_of_their_whole_weight_are_one[late copies-2-nvme]",
    "tests/model/test_tiling.py::test_tiled_runs_have_the_same_bits_on_every_tier[late copies--2]",
    "tests/model/test_tiling.py::"
    "test_tiles_of_units_whose_activations_wait_train_as_plain_torch[late copies-False-cpu]",
    "tests/parity/test_small_states.py::"
    "test_resumed_training_has_the_bits_of_training_that_never_stopped[split, parameters on disk-2-8bit]",
    "tests/threads/test_beside.py::test_what_changes_the_run_waits_for_the_end_of_a_pass[activations on nvme-commit]",
    "tests/threads/test_readers.py::"
    "test_a_reader_sees_values_of_one_step_and_the_training_its_own[activations on nvme-commit]",
)
"""What takes many seconds and has others beside it that stand for it in make test: all cases of a test, or one."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore it, and so would all processes that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several workers run tests, one runs all of ranks: they share processes, which are started once. Likewise
    for files whose tests share trainings."""
    from xdist.scheduler import LoadScopeScheduling

    class Ranks(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(OF_RANKS):
                return "ranks"
            return nodeid.partition("::")[0] if nodeid.startswith(SHARING) else nodeid

        def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
            """The newest scopes up to one that is through: a worker runs them in order. Counting all of them, as xdist
            does, takes time that grows with the square of the number of tests."""
            pending = 0
            for tests in reversed(workload.values()):
                left = [*tests.values()].count(False)
                if not left:
                    break
                pending += left
            return pending

    return Ranks(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules and tests stay: half a million objects that no collection of garbage has to look through any more."""
    gc.collect()
    gc.freeze()
    gc.enable()


WORLDS = Worlds()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(n)`: n ranks, started once for all tests."""
    yield WORLDS
    WORLDS.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """No rank waits for the rest of the session once a worker is through with those tests: see MANY_THREADS."""
    if nextitem is not None and not nextitem.nodeid.startswith((*OF_RANKS, *OWN_RANKS)):
        WORLDS.close()


@pytest.fixture(autouse=True, scope="session")
def _trials() -> Iterator[None]:
    """With OFFLOAD_TEST_TRIALS=1 each run tries its steps in backward, where it can."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("OFFLOAD_TEST_TRIALS"):
            tried.everywhere(patch)
        yield


@pytest.fixture
def copied_by() -> Iterator[CopiedBy]:
    """`copied_by(lambda: LateCopier(1))`: the OffloadZeros that the test makes from there on copy by it."""
    with ExitStack() as until_the_end:
        yield lambda make: until_the_end.enter_context(copying_by(make))


CACHES = itertools.count()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what is remembered of this machine's disks. Whoever writes makes the directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{next(CACHES)}"))


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> Iterator[None]:
    """A test that fails for what another one left on in this process would name the wrong one."""
    yield
    assert not torch._C._is_torch_function_all_disabled(), "all torch functions are off (DisableTorchFunction)"
    assert torch._C._is_torch_function_enabled(), "those of subclasses are off (DisableTorchFunctionSubclass)"
    assert not torch._C._len_torch_function_stack(), "a torch function mode is still on"
    assert not torch._C._len_torch_dispatch_stack(), "a dispatch mode is still on"
    assert torch.is_grad_enabled(), "gradients are off for this thread"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        # Before torch 2.13 a checkpoint whose function raised leaves its hooks on until its generator is collected.
        gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "hooks for saved tensors are still on"


@pytest.fixture(autouse=True)
def _orders_its_streams() -> Iterator[None]:
    """On the simulated accelerator: each two uses of memory by different streams have an order."""
    yield
    if simulated_device.is_wanted():
        found = simulated_device.races()
        assert not found, "\n".join(found[:10])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` chooses: a test of all combinations of several lists of values runs them all in make test-slow. In
    make test it runs as few of them as have each value of each list."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if "worlds" in getattr(item, "fixturenames", ()) and not item.nodeid.startswith((*OF_RANKS, *OWN_RANKS)):
            raise pytest.UsageError(f"{item.nodeid} uses `worlds`, and OF_RANKS does not name it")
        name = item.nodeid.partition("[")[0]
        if item.nodeid in DEAR or name in DEAR:
            item.add_marker("slow")  # before some are chosen: others have to have its values
        if name.startswith(PRODUCTS) and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault(name, []).append(item)
    for cases in tests.values():
        often = [item for item in cases if not any(map(item.get_closest_marker, ("slow", "oracle")))]
        chosen = covering([_values(item) for item in often])
        for number, item in enumerate(often):
            if number not in chosen:
                item.add_marker("slow")


def _values(item: pytest.Function) -> list[tuple[int, ...]]:
    """What a case has of each list that its test is parametrized with."""
    params = dict(item.callspec.params)
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [one.replace(",", " ").split() if isinstance(one, str) else one for one in lists]
    values = [tuple(id(params.pop(name)) for name in each if name in params) for each in names]
    return [*values, *((id(value),) for value in params.values())]  # the rest are those of fixtures


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    made = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False, capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("may not mount a small tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
