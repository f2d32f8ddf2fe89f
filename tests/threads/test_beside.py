"""What other threads do beside the one that trains, each at a moment that is chosen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero
from offload.errors import BudgetError, ConfigError, OffloadError, ReleasedParameterError
from tests.support import models
from tests.support.beside import PLACEMENTS, Block, Model, batch, expected_of, hold, train
from tests.support.cases import often
from tests.support.processes import holds_in_child
from tests.support.ranks import Worlds

STREAMED = {name: options for name, options in PLACEMENTS.items() if "param_tier" in options}


def in_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns, or raises, in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert found, "the thread did not end"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class Calling(Block):
    """A block in whose forward, and in its backward, somebody is called."""

    call: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda grad: self.call())
        return x


def calling() -> Model:
    model = Model()
    block = Calling()
    block.load_state_dict(model.blocks[1].state_dict())
    model.blocks[1] = block
    return model


# Where activations wait somewhere, parameters stream from there, too.
@pytest.fixture(params=often(PLACEMENTS, "resident", "activations in RAM", "activations on nvme"))
def placement(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PLACEMENTS[request.param]


def test_a_thread_that_a_forward_waits_for_reads_all_parameters_there(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    expected = expected_of(1e-2, commits=False, **placement)
    model = calling()
    reads: list[dict[str, Tensor]] = []

    def read() -> None:
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            assert torch.equal(param.norm(), values[name].norm())
        saved = model.state_dict()
        assert all(torch.equal(saved[name], value) for name, value in values.items())
        reads.append(values)

    model.blocks[1].call = lambda: in_thread(read)
    with hold(model, tmp_path / "run", 1e-2, **placement) as optimizer:
        assert train(model, optimizer) == expected.losses
    assert len(reads) >= 2 * len(expected.losses)
    for values in reads:
        assert expected.steps_of(values)


def test_a_parameter_is_plain_for_the_thread_that_runs_its_unit_alone(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    """Another thread's use waits, as it does for any operation, and does not compute with memory that may go."""
    model = calling()
    weight = model.get_parameter("blocks.1.up.weight")
    waited: list[bool] = []

    def use() -> None:
        thread = threading.Thread(target=lambda: weight.detach().sum())
        with optimizer.entries.lock:
            thread.start()
            thread.join(0.05)
            waited.append(thread.is_alive())
            assert torch.equal(weight.sum(), plain.sum())  # this thread goes on
        thread.join(30)
        assert not thread.is_alive()

    plain = weight.detach().clone()
    model.blocks[1].call = use
    with hold(model, tmp_path, 1e-2, **placement) as optimizer, torch.no_grad():
        model(batch(0))
    assert waited == [True]


def test_a_parameter_is_plain_for_the_thread_that_uses_it_alone(placement: dict[str, Any], tmp_path: Path) -> None:
    model = Model()
    weight = model.get_parameter("blocks.1.up.weight")
    waited: list[bool] = []

    class Slow(torch.Tensor):
        """Whoever adds it to another tensor waits for a thread that cannot go on until then."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            thread.start()
            thread.join(0.05)
            waited.append(thread.is_alive())
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    plain = weight.detach().clone()
    with hold(model, tmp_path, 1e-2, **placement), torch.no_grad():
        thread = threading.Thread(target=lambda: weight.detach().sum())
        found = torch.add(weight, torch.zeros(1).as_subclass(Slow))
        thread.join(30)
        assert torch.equal(found.as_subclass(Tensor), plain)
    assert waited == [True]


class Borrowing(Model):
    """Multiplies by a weight of block 2 outside of it. Its backward calls somebody right before it uses the weight."""

    call: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = nn.functional.linear(x, self.blocks[2].up.weight)
        if x.requires_grad:
            x.grad_fn.register_prehook(lambda grads: self.call())
        return x


def test_what_a_backward_is_about_to_use_stays_while_another_thread_reads(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    alone = Borrowing()
    with hold(alone, tmp_path / "expected", 1e-2, **placement) as optimizer:
        expected = train(alone, optimizer)
    model = Borrowing()
    reads: list[float] = []

    def read() -> None:
        reads.extend([block.down.weight.norm().item() for block in model.blocks])
        model.state_dict()

    model.call = lambda: in_thread(read)
    with hold(model, tmp_path / "run", 1e-2, **placement) as optimizer:
        assert train(model, optimizer) == expected
    assert len(reads) == 4 * len(expected)


def test_a_write_from_another_thread_during_a_forward_counts(placement: dict[str, Any], tmp_path: Path) -> None:
    """Beside plain torch, in which the same thread writes at the same moment."""

    def run(optimizer_of: Callable[[nn.Module], Any]) -> tuple[list[float], dict[str, Tensor]]:
        model = calling()
        done: list[bool] = []

        @torch.no_grad()
        def write() -> None:
            model.blocks[3].down.weight.mul_(0.5)
            model.blocks[3].down.bias.fill_(0.25)

        def once() -> None:
            if not done:
                done.append(True)
                in_thread(write)

        model.blocks[1].call = once
        optimizer = optimizer_of(model)
        losses = train(model, optimizer)
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    plain = run(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0))
    held = run(lambda model: hold(model, tmp_path, 1e-2, **placement))
    assert torch.allclose(torch.tensor(held[0]), torch.tensor(plain[0]), rtol=1e-5)
    assert all(torch.allclose(held[1][name], value, atol=1e-5) for name, value in plain[1].items())


@pytest.mark.parametrize("what", ["commit", "p.grad"])
def test_what_changes_the_run_waits_for_the_end_of_a_pass(what: str, placement: dict[str, Any], tmp_path: Path) -> None:
    expected = expected_of(1e-2, commits=True, **placement)
    model = calling()
    threads: list[threading.Thread] = []
    order: list[str] = []

    def beside() -> None:
        if what == "commit":
            optimizer.commit()
        else:
            try:
                param = model.get_parameter("blocks.1.up.weight")
                if param.grad is not None:
                    param.grad.norm()
            except OffloadError:  # the step has used it meanwhile
                pass
        order.append("done")

    def begin() -> None:
        if not threads and optimizer.stats()["step"] == 2:
            if what == "p.grad" and model.get_parameter("blocks.3.up.weight").grad is None:
                return  # in forward; in backward some gradients are there
            threads.append(threading.Thread(target=beside))
            threads[0].start()
            threads[0].join(0.2)
            order.append("pass goes on")

    model.blocks[1].call = begin
    with hold(model, tmp_path / "run", 1e-2, commits=True, **placement) as optimizer:
        assert train(model, optimizer) == expected.losses
        threads[0].join(30)
    assert sorted(order) == ["done", "pass goes on"]
    if what == "commit":
        assert order == ["pass goes on", "done"]


@pytest.mark.parametrize("placement", list(STREAMED))
def test_a_training_forward_waits_for_one_of_another_thread(placement: str, tmp_path: Path) -> None:
    expected = expected_of(1e-2, commits=False, **PLACEMENTS[placement])
    model = calling()
    inside, may_end = threading.Event(), threading.Event()
    outputs: list[Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            outputs.append(model(batch(0)))

    def call() -> None:
        if threading.current_thread() is thread:
            inside.set()
            assert may_end.wait(30)

    thread = threading.Thread(target=evaluate)
    with hold(model, tmp_path / "run", 1e-2, **PLACEMENTS[placement]) as optimizer:
        losses = train(model, optimizer)
        model.blocks[1].call = call
        thread.start()
        assert inside.wait(30)
        threading.Timer(0.2, may_end.set).start()
        with torch.no_grad():
            output = model(batch(0))
        assert may_end.is_set()
        thread.join(30)
    assert losses == expected.losses
    assert torch.equal(outputs[0], output)


@pytest.mark.parametrize("placement", list(STREAMED))
def test_a_forward_of_another_thread_is_refused_during_a_backward(placement: str, tmp_path: Path) -> None:
    expected = expected_of(1e-2, commits=False, **PLACEMENTS[placement])
    model = calling()
    refused: list[str] = []

    def call() -> None:
        if threading.current_thread() is threading.main_thread():
            with pytest.raises(ConfigError, match="one thread at a time") as caught, torch.no_grad():
                in_thread(lambda: model(batch(0)))
            refused.append(str(caught.value))

    model.blocks[1].call = call
    with hold(model, tmp_path / "run", 1e-2, **PLACEMENTS[placement]) as optimizer:
        assert train(model, optimizer) == expected.losses
    assert len(refused) >= 2 * len(expected.losses)


def test_where_the_device_lacks_room_the_other_thread_alone_is_told(tmp_path: Path) -> None:
    options = {"tier": "cpu", "param_tier": "cpu", "device_memory": "240KiB"}
    expected = expected_of(1e-2, commits=False, **options)
    model = calling()
    found: list[object] = []

    def read() -> None:
        weights = [model.get_parameter(f"blocks.{number}.up.weight") for number in (0, 2, 3)]
        weights[0].norm()
        try:
            torch.cat(weights)
        except BudgetError as error:
            found.append(error.option)

    model.blocks[1].call = lambda: in_thread(read)
    with hold(model, tmp_path / "run", 1e-2, **options) as optimizer:
        limit = optimizer.stats()["device_budget_bytes"]
        assert train(model, optimizer) == expected.losses
        assert optimizer.stats()["peak_device_bytes"] <= limit
    # In each forward of block 1. In its backward the unit in use is one of the three.
    assert found == ["device_memory"] * len(expected.losses)


def test_a_forked_child_is_not_locked_out_by_a_thread_of_its_parent(tmp_path: Path) -> None:
    model = Model()
    with hold(model, tmp_path, 1e-2, tier="cpu") as optimizer:
        inside, may_end = threading.Event(), threading.Event()

        def stay() -> None:
            with optimizer.entries.lock:
                inside.set()
                may_end.wait(30)

        thread = threading.Thread(target=stay)
        thread.start()
        try:
            assert inside.wait(30)
            assert holds_in_child(lambda: bool(model.head.weight.norm() > 0), timeout_s=10)
        finally:
            may_end.set()
            thread.join(30)


def test_two_models_train_in_two_threads_at_once(placement: dict[str, Any], tmp_path: Path) -> None:
    expected = expected_of(1e-2, commits=False, **placement)
    losses: dict[int, list[float]] = {}
    models = [Model(), Model()]  # here, because their values are drawn from one generator

    def run(number: int) -> None:
        model = models[number]
        with hold(model, tmp_path / str(number), 1e-2, **placement) as optimizer:
            losses[number] = train(model, optimizer)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert losses == {0: expected.losses, 1: expected.losses}


def _use_beside(stage: int) -> None:
    """On each rank a thread tries during a forward what all ranks would have to do together."""
    model = models.build("gpt")
    options: dict[str, Any] = {"stage": 3, "param_tier": "cpu"} if stage == 3 else {"stage": stage}
    errors: list[type[BaseException]] = []
    with OffloadZero(model, tier="cpu", compute_dtype=torch.float32, **options) as optimizer:
        first, *_, last = model.parameters()

        def attempt(call: Callable[[], object]) -> None:
            try:
                in_thread(call)
            except OffloadError as error:
                errors.append(type(error))

        def beside(*given: Any) -> None:
            if len(given) == 3:  # in forward; the hook of a tensor calls with the gradient
                given[2].register_hook(beside)
            attempt(lambda: optimizer.state_of(first))
            attempt(lambda: optimizer.synchronize())
            if stage == 3:
                attempt(lambda: next(iter(blocks[-1].parameters())).norm())

        blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        handle = blocks[0].register_forward_hook(beside)
        x = torch.zeros(1, 4, dtype=torch.long)
        model(x)[0].float().square().sum().backward()
        handle.remove()
        optimizer.step()
        assert torch.isfinite(optimizer.state_of(last)["master"]).all()
    assert errors == 2 * [ConfigError, ConfigError, *([ReleasedParameterError] if stage == 3 else [])]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_needs_all_ranks_is_refused_beside_the_thread_that_trains(worlds: Worlds, stage: int) -> None:
    worlds(2).run(_use_beside, stage)
