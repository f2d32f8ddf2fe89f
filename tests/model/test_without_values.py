"""Guards, stand-ins and states serve each kind of function, with fakes of what is below them, and no optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.entries import Entries
from offload.errors import ConfigError, GradientMovedError, ReleasedParameterError
from offload.model.fetch import HeldUnits, StreamedUnits
from offload.model.gradient import Answers
from offload.model.guard import Guards
from offload.model.held_param import HeldParam
from offload.model.inner import Inner
from offload.model.running import Here
from offload.model.states import StateTensor
from offload.model.torch_functions import Kind, kind_of
from offload.optim.scale import StepScale
from tests.model.test_torch_functions import CALLS, answer, flat, functions_of, name_of, tried, values


class OneUnit:
    title, watched = "the unit", ()


UNIT = OneUnit()


class Uses:
    """The units of a model whose only parameter is there all the time. Notes what is used."""

    def __init__(self, parameters: Any = None) -> None:
        self.entries = Entries()
        self.running = SimpleNamespace(here=Here(), watches=lambda *_: False)
        self.noted: list[str] = []

    def apply(self, unit: Any) -> None:
        self.noted.append("applied")

    @contextmanager
    def used(self, units: Sequence[Any]) -> Iterator[None]:
        self.noted += ["fetched"] * len(units)
        yield


class Resident(Uses, HeldUnits):
    pass


class Streamed(Uses, StreamedUnits):
    is_training = False

    def fetch_before(self, node: Any, units: Any, *, is_used: bool = True) -> None:
        self.noted.append("fetched before a node")

    def keep(self, units: Any) -> None:
        self.noted.append("kept")


class OneParameter:
    """What guards and gradients ask of the parameters of a model, of one that has one."""

    def __init__(self, param: nn.Parameter, *, streams: bool = False) -> None:
        self.layout: Any = SimpleNamespace(
            specs=[SimpleNamespace(name="weight", unit="unit", tile=0)],
            flats=[],
            slices=[],
            ranks=1,
            shard_group_size=1,
        )
        self.units, self.tiles = {"unit": UNIT}, {}
        self.params, self.locals, self.trained = (param,), (param,), 1
        self.wrappers: dict[Any, Any] = {}
        spec: Any = self.layout.specs[0]
        unit: Any = UNIT
        self.held = (HeldParam(0, spec, Inner(param, "", param), unit, 0, 0, streams=streams),)
        self.held[0].remember()
        self.home = self.device = torch.device("cpu")
        self.is_parked = False
        self.streams_any = streams

    def number_of(self, tensor: Any) -> int | None:
        return 0 if tensor is self.params[0] else None

    def wrapper_of(self, tensor: Any) -> None:
        return None

    def streams(self, number: int) -> bool:
        return self.streams_any

    def slice_at(self, tensor: Tensor) -> int | None:
        return None


class Guarded:
    def __init__(self, *, streams: bool) -> None:
        self.param = nn.Parameter(values())
        self.units: Any = (Streamed if streams else Resident)()  # type: ignore[operator]
        parameters: Any = OneParameter(self.param, streams=streams)
        self.guards = Guards(parameters, self.units, self.moves)
        self.param.__class__ = self.guards.class_for(nn.Parameter, streams=streams)  # type: ignore[assignment]

    def moves(self, module: nn.Module, device: torch.device) -> bool:
        raise AssertionError("no module moves")

    @property
    def uses(self) -> list[str]:
        noted, self.units.noted = self.units.noted, []
        return [one for one in noted if one in ("applied", "fetched")]


@pytest.fixture(params=[False, True], ids=["resident", "streamed"])
def guarded(request: pytest.FixtureRequest) -> Guarded:
    return Guarded(streams=request.param)


def test_a_guard_fetches_nothing_for_what_only_asks(guarded: Guarded) -> None:
    plain = nn.Parameter(values())
    for func in functions_of(Kind.META):
        found, expected = answer(func, guarded.param), answer(func, plain)
        if not {"_cdata", "__hash__"} & set(name_of(func).split(".")):
            assert found == expected, func
    for make in (torch.zeros_like, torch.rand_like, lambda p: p.new_ones(3)):
        make(guarded.param)
    guarded.param.requires_grad = False
    guarded.param.requires_grad_().grad = torch.ones(4, 4)
    assert torch.equal(guarded.param.grad, torch.ones(4, 4))
    assert guarded.uses == []


USES: dict[str, Callable[[Any], Any]] = {
    "READ": lambda p: p.sum(),
    "WRITE": lambda p: p.add_(1),
    "DETACH": lambda p: p.detach(),
    "a MOVE that casts": lambda p: p.double(),
    "one that is given a value": lambda p: torch.full_like(p, 2.0),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_a_guard_makes_the_unit_current_once_for_a_use(guarded: Guarded, use: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        found = use(guarded.param)
        assert len(guarded.uses) == 1
        assert torch.equal(found, use(values()))


def test_a_guard_returns_the_parameter_where_a_move_is_none(guarded: Guarded) -> None:
    assert guarded.param.to("cpu") is guarded.param.float() is guarded.param
    assert guarded.uses == []


def test_a_guard_gives_away_copies_of_what_streams_and_keeps_its_memory(guarded: Guarded) -> None:
    is_streamed = isinstance(guarded.units, Streamed)
    array = guarded.param.requires_grad_(False).numpy()
    assert array.tolist() == values().tolist()
    assert array.flags.writeable == (not is_streamed)
    address = guarded.param.data_ptr()
    assert (array.ctypes.data == address) == (not is_streamed)
    if is_streamed:
        with pytest.raises(ReleasedParameterError, match="resize_ on a streamed parameter"):
            guarded.param.resize_(64, 64)
        assert guarded.param.data_ptr() == address
    else:
        assert guarded.param.share_memory_() is guarded.param


def test_a_guard_lets_other_threads_in_only_while_autograd_runs(guarded: Guarded) -> None:
    lock, seen = guarded.units.entries.lock, []
    loss = guarded.param.sum()
    loss.__class__ = guarded.guards.class_for(Tensor, streams=False)
    loss.register_hook(lambda _: seen.append(lock._is_owned()))
    torch.autograd.grad(loss, guarded.param, retain_graph=True)
    loss.backward()
    assert seen == [False, False]

    def look(one: Tensor) -> Tensor:
        seen.append(lock._is_owned())
        return one

    guarded.guards.call(kind_of(look), look, (guarded.param,), {})
    assert seen == [False, False, True]


class Buffer:
    """A gradient buffer in RAM, of one parameter. Counts reads."""

    def __init__(self) -> None:
        self.gradient = values().reshape(-1)
        self.reads = 0

    def has(self, param: int) -> bool:
        return True

    def finalize(self, params: Sequence[int]) -> None:
        pass

    def values(self, param: int) -> Tensor:
        self.reads += 1
        return self.gradient

    def write(self, param: int, new: Tensor) -> None:
        self.gradient = new.clone()

    def clear(self, param: int) -> None:
        pass

    def accumulate(self, param: int, new: Tensor, start: int = 0) -> None:
        self.gradient = new.clone()

    def norms(self, params: Sequence[int], order: float) -> list[float]:
        return [float(torch.linalg.vector_norm(self.gradient, order))]


class Answered:
    def __init__(self) -> None:
        self.param = nn.Parameter(torch.zeros(4, 4))
        parameters: Any = OneParameter(self.param)
        self.buffer: Any = Buffer()
        rest: Any = SimpleNamespace(entries=Entries(), backward_runs=None)
        self.answers = Answers(parameters.layout, parameters, self.buffer, StepScale(), rest, rest, rest)
        self.param.grad = parameters.held[0].gradient.stand_in

    @property
    def grad(self) -> Any:
        return self.param.grad


def test_a_stand_in_reads_no_values_for_what_needs_none() -> None:
    answered, plain = Answered(), values()
    for func in functions_of(Kind.META):
        if func in (Tensor.is_same_size, torch.is_same_size):  # torch dispatches it, as it does what reads values
            continue
        found, expected = answer(func, answered.grad), answer(func, plain)
        if not {"_cdata", "__hash__"} & set(name_of(func).split(".")):
            assert found == expected, func
    for func in (*functions_of(Kind.DETACH), *functions_of(Kind.MOVE)[:2], Tensor.requires_grad_, Tensor.share_memory_):
        more = ("cpu",) if func is Tensor.to else ()
        assert func(answered.grad, *more) is answered.grad
    for func in functions_of(Kind.LIKE):
        sizes = ((2, 3),) if name_of(func).startswith("torch.Tensor.new") else ()
        made = func(answered.grad, *sizes)
        assert (type(made), made.device, made.dtype) == (Tensor, plain.device, plain.dtype)
    torch.testing.assert_close(answered.grad.norm(), plain.norm())
    assert answered.buffer.reads == 0


def test_a_stand_in_reads_values_for_a_read_and_writes_nothing_back() -> None:
    answered = Answered()
    assert torch.equal(answered.grad + 1, values() + 1)
    assert torch.equal(answered.grad.double(), values().double())
    assert answered.buffer.reads == 2
    assert torch.equal(answered.buffer.gradient, values().reshape(-1))


def in_place() -> Iterator[tuple[Any, tuple[Any, ...], Tensor]]:
    """Torch's functions that write, arguments that they take, and what they make of the first one."""
    for func in (one for one in tried() if kind_of(one) is Kind.WRITE):
        for make in CALLS:
            args = make()
            first = flat(args)[0]
            if first.dtype is not torch.float32 or first.shape != (4, 4):
                continue
            try:
                torch.manual_seed(0)
                is_taken = func(*args) is not NotImplemented
            except Exception:  # it takes other arguments
                continue
            if is_taken and first.shape == (4, 4):
                yield func, make(), first


@pytest.mark.filterwarnings("ignore")
def test_whatever_writes_to_a_stand_in_changes_the_gradient_as_torch_does() -> None:
    written, wrong = set(), set()
    for func, (first, *more), expected in in_place():
        answered = Answered()
        given = [answered.grad] if isinstance(first, list) else answered.grad
        torch.manual_seed(0)
        func(given, *more)
        found = answered.answers.values_of(0)
        if not torch.allclose(found, expected, rtol=1e-6, atol=0, equal_nan=True):
            wrong.add(name_of(func))
        written.add(func)
    assert wrong == set()
    assert len(written) > 100


def test_a_stand_in_refuses_other_memory() -> None:
    answered = Answered()
    for give in (lambda g: g.resize_(2, 2), lambda g: g.set_(torch.ones(2))):
        with pytest.raises(GradientMovedError, match=r"the gradient of weight, which is elsewhere: assign"):
            give(answered.grad)
    assert torch.equal(answered.buffer.gradient, values().reshape(-1))


class Tiers:
    """The states of one parameter. Counts reads."""

    def __init__(self) -> None:
        self.reads = 0

    def shown(self, param: Any) -> Mapping[str, Any]:
        return {"exp_avg": None}

    def read(self, param: Tensor) -> Mapping[str, Any]:
        self.reads += 1
        return {"exp_avg": values()}


@pytest.mark.filterwarnings("ignore")
def test_a_state_refuses_whatever_writes_and_reads_nothing_for_it() -> None:
    tiers, refused = Tiers(), set()
    state = StateTensor.of(torch.ones(4, 4), "exp_avg", weakref.WeakMethod(tiers.shown), weakref.WeakMethod(tiers.read))
    for func, (first, *more), _ in in_place():
        with pytest.raises(ConfigError, match=r"optimizer\.state"):
            func([state] if isinstance(first, list) else state, *more)
        refused.add(func)
    for write in (lambda: torch.add(values(), 1, out=state), lambda: setattr(state, "grad", values())):
        with pytest.raises(ConfigError, match=r"optimizer\.state"):
            write()
    assert len(refused) > 100
    assert torch.equal(torch.zeros_like(state), torch.zeros(4, 4))
    assert state.cpu() is state.detach() is state.share_memory_() is state
    assert tiers.reads == 0
    assert torch.equal(state * 2, values() * 2)
    assert tiers.reads == 1
    plain = torch.zeros(4, 4)
    assert torch.equal(plain.add_(state), values())  # it writes to another tensor
