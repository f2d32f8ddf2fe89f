"""What the table of torch's functions says of each one is what the function does, as torch itself shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import get_overridable_functions, get_testing_overrides, resolve_name

from offload import torch_private
from offload.model import torch_functions
from offload.model.torch_functions import Kind, changed, counting, kind_of, moved_to, takes_lists

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    OVERRIDABLE = {func for functions in get_overridable_functions().values() for func in functions}
    OVERRIDABLE |= set(get_testing_overrides())

SORTED = [(kind, func) for kind, functions in torch_functions._SORTED.items() for func in functions]
_ATTRIBUTES: dict[str, Any] = vars(torch._C.TensorBase)
NOT_LISTED = {
    *(_ATTRIBUTES[name].__set__ for name in ("grad", "requires_grad", "data", "real", "imag")),
    *(_ATTRIBUTES["grad"].__delete__, Tensor.__hash__, Tensor.stride, Tensor._is_zerotensor),
    *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, torch.rand_like, torch.randn_like, torch.result_type),
    *(torch.detach_, torch.resize_as_, torch.resize_as_sparse_),
    *(torch.autograd.grad, torch.autograd.backward),
    *(torch_private.to_dlpack, torch_private.has_compatible_type),
}
"""Functions that torch hands to `__torch_function__`, and does not list as overridable."""


DISPATCHED = {
    (name, overload) for name, _, overload in (one.partition(".") for one in torch._C._dispatch_get_all_op_names())
}


def name_of(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func))


def schemas_of(func: Any) -> list[Any]:
    """The schemas of a function of torch on tensors; none of those that take the output as their last argument."""
    found = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(func, '__name__', '')}")
    about_tensors = (one for one in found if one.arguments and "Tensor" in str(one.arguments[0].type))
    named = ((one, one.overload_name) for one in about_tensors)
    # TorchScript has functions of these names for its lists, of which torch's dispatcher does not know.
    return [one for one, name in named if "out" not in name and (one.name, name) in DISPATCHED]


def written_by(schema: Any) -> list[int]:
    """The places of the positional arguments to which a function writes, as its schema says."""
    places = enumerate(schema.arguments)
    return [at for at, one in places if one.alias_info and one.alias_info.is_write and not one.kwarg_only]


def test_no_function_is_sorted_twice_and_each_is_one_that_torch_hands_over() -> None:
    functions = [func for _, func in SORTED]
    assert len(set(functions)) == len(functions)
    assert {name_of(func) for func in set(functions) - OVERRIDABLE - NOT_LISTED} == set()


NO_VALUE_CHANGES = {"record_stream"}
"""Its schema says that it writes, so that no compiler leaves it out."""


def test_what_writes_by_its_schema_and_only_that_is_sorted_so() -> None:
    may_write = {Kind.WRITE, Kind.SET, Kind.DETACH, Kind.REFUSE}
    seen, wrong = 0, {}
    for func in OVERRIDABLE:
        schemas = schemas_of(func)
        writes = any(map(written_by, schemas))
        seen += bool(schemas)
        if writes and kind_of(func) not in may_write and func.__name__ not in NO_VALUE_CHANGES:
            wrong[name_of(func)] = kind_of(func)
        if schemas and not writes and kind_of(func) in (Kind.WRITE, Kind.REFUSE):
            wrong[name_of(func)] = kind_of(func)
    assert wrong == {}
    assert seen > 1000


def test_what_a_call_changes_by_its_schema_is_its_first_argument() -> None:
    seen, wrong = 0, {}
    for func in OVERRIDABLE:
        if kind_of(func) not in (Kind.WRITE, Kind.REFUSE):
            continue
        for schema in schemas_of(func):
            seen += 1
            if (0 in written_by(schema)) != bool(changed(func, [object()], {})):
                wrong[name_of(func)] = str(schema)
    assert wrong == {}
    assert seen > 200


def overloads() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from (getattr(packet, overload) for overload in packet.overloads())


def test_what_dispatch_hands_over_is_sorted_by_its_schema() -> None:
    found = list(overloads())
    assert {kind_of(func) for func in found} == {Kind.READ, Kind.WRITE, Kind.REFUSE}
    for func in found:
        assert (kind_of(func) is not Kind.READ) == any(one.is_write for one in func._schema.arguments)
    assert kind_of(torch.ops.aten.set_.source_Tensor) is Kind.REFUSE


def values() -> Tensor:
    return torch.arange(1.0, 17.0).reshape(4, 4) / 8


def numbers() -> Tensor:
    return torch.arange(16, dtype=torch.int32).reshape(4, 4)


def rows() -> Tensor:
    return torch.zeros(4, 4, dtype=torch.int64)


CALLS: tuple[Callable[[], tuple[Any, ...]], ...] = (
    lambda: (values(),),
    lambda: (values(), values() + 1),
    lambda: (values(), 2),
    lambda: (values(), 0, 1),
    lambda: (values(), 0, values()),
    lambda: (values(), values(), values()),
    lambda: ([values()],),
    lambda: ([values()], [values() + 1]),
    lambda: ([values()], 2.0),
    lambda: (values(), values() > 1, 3.0),
    lambda: (values(), 0, rows(), values() + 1),
    lambda: (values(), 0, rows(), 3.0),
    lambda: (numbers(), numbers() + 3),
    lambda: (numbers(), 3),
    lambda: (values(), values() + 1, lambda one, other: one + other),
    lambda: (values(), values() + 1, values() + 2, lambda one, *others: one + sum(others)),
    lambda: (values(), lambda one: one + 1),
    lambda: (torch.ones(1),),
    lambda: (torch.ones(1, dtype=torch.int64),),
)
"""Arguments. Each function that is tried takes some of them."""


def flat(args: tuple[Any, ...]) -> list[Tensor]:
    return [one for arg in args for one in (arg if isinstance(arg, list) else [arg]) if isinstance(one, Tensor)]


def runs_of(func: Any) -> Iterator[tuple[tuple[Any, ...], list[bool], list[bool]]]:
    """The arguments that a function takes, whether it has changed the values of each tensor, and its version."""
    for make in CALLS:
        args = make()
        tensors = flat(args)
        before = [(one.clone(), one._version) for one in tensors]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                func(*args)
            except Exception:  # it takes other arguments
                continue
        are_new = [
            one.shape != old.shape or not torch.equal(one.nan_to_num(), old.nan_to_num())
            for one, (old, _) in zip(tensors, before, strict=True)
        ]
        yield args, are_new, [one._version != old for one, (_, old) in zip(tensors, before, strict=True)]


SENDS = {"recv", "all_gather", "reduce", "all_to_all", "all_gather_single", "reduce_scatter", "reduce_scatter_single"}


def tried() -> list[Any]:
    """The functions that are run: those without a schema, and those that write.

    Some of torch's others end the process if they are given what they do not expect.
    """
    found = (one for one in OVERRIDABLE if not schemas_of(one) or kind_of(one) is Kind.WRITE)
    return sorted((one for one in found if getattr(one, "__name__", "") not in SENDS), key=name_of)


@pytest.mark.filterwarnings("ignore")
def test_what_a_call_writes_is_what_the_table_says() -> None:
    ran: dict[str, set[Kind]] = {}
    wrong = {}
    for func in tried():
        if kind_of(func) is Kind.REFUSE:
            continue
        for args, are_new, are_counted in runs_of(func):
            told = {id(one) for one in flat(changed(func, args, {}))}
            written = {
                id(one) for one, new, counted in zip(flat(args), are_new, are_counted, strict=True) if new or counted
            }
            if not written <= told or (told and kind_of(func) is not Kind.WRITE):
                wrong[name_of(func)] = kind_of(func)
            ran.setdefault(name_of(func), set()).add(Kind.WRITE if written else Kind.READ)
    assert wrong == {}
    assert len(ran) > 250
    writes = {name_of(func) for func in tried() if kind_of(func) is Kind.WRITE}
    # Each function that says it writes has been seen to, if it could be run.
    assert {name for name in writes & ran.keys() if Kind.WRITE not in ran[name]} == set()
    assert len(writes & ran.keys()) > 150


def test_the_functions_whose_writes_torch_does_not_count_are_the_listed_ones() -> None:
    uncounted = set()
    for func in tried():
        for _, are_new, are_counted in runs_of(func):
            if any(new and not counted for new, counted in zip(are_new, are_counted, strict=True)):
                uncounted.add(func)
        for _, are_new, are_counted in runs_of(counting(func)):
            assert not any(new and not counted for new, counted in zip(are_new, are_counted, strict=True)), func
    assert uncounted == set(torch_functions.UNCOUNTED)


WITH_ANOTHER = {Tensor.is_same_size, torch.is_same_size, torch.result_type, torch_private.has_compatible_type}


def functions_of(kind: Kind) -> list[Any]:
    return [func for one, func in SORTED if one is kind]


def answer(func: Any, one: Tensor) -> Any:
    args = (one, one) if func in WITH_ANOTHER else (one,)
    try:
        return func(*args)
    except (RuntimeError, AttributeError) as error:  # `nbytes` of some layouts, `grad_fn` of others
        return type(error)


def metadata(of: Any) -> Any:
    """An answer without what tells two tensors, or their devices, apart."""
    return type(of) if isinstance(of, torch.device | torch.Size) else of


ABOUT_THE_DEVICE = {"device", "is_cpu", "is_meta", "get_device", "_cdata", "__hash__"}


@pytest.mark.parametrize("func", functions_of(Kind.META), ids=name_of)
def test_what_asks_for_metadata_reads_no_values(func: Any) -> None:
    one = values()
    version = one._version
    here, elsewhere = answer(func, one), answer(func, torch.empty_strided((4, 4), (4, 1), device="meta"))
    if not any(f".{name}" in f".{name_of(func)}" for name in ABOUT_THE_DEVICE):
        assert metadata(here) == metadata(elsewhere)
    assert torch.equal(one, values())
    assert one._version == version


@pytest.mark.parametrize("func", functions_of(Kind.LIKE), ids=name_of)
def test_what_makes_a_tensor_like_another_gets_none_of_its_values(func: Any) -> None:
    sizes = ((3, 2),) if name_of(func).startswith("torch.Tensor.new") else ()
    made = []
    for one in (values().t(), torch.empty_strided((4, 4), (1, 4), device="meta")):
        torch.manual_seed(0)
        made.append(func(one, *sizes, device="cpu"))
    assert [(one.shape, one.stride(), one.dtype) for one in made[:1]] == [
        (one.shape, one.stride(), one.dtype) for one in made[1:]
    ]
    if "empty" not in name_of(func):
        assert torch.equal(*made)


@pytest.mark.parametrize("func", functions_of(Kind.SET), ids=name_of)
def test_what_changes_metadata_reads_and_writes_no_values(func: Any) -> None:
    more: dict[str, tuple[Any, ...]] = {
        "register_hook": (print,),
        "register_post_accumulate_grad_hook": (print,),
        "__set__": (None if "grad" in repr(func.__self__) and "requires" not in repr(func.__self__) else True,)
        if hasattr(func, "__self__")
        else (),
    }
    for device in ("cpu", "meta"):  # a tensor on meta has no values
        one = torch.ones(4, 4, device=device, requires_grad=True)
        version = one._version
        func(one, *more.get(func.__name__, ()))
        assert one._version == version
        assert device == "meta" or torch.equal(one, torch.ones(4, 4))


@pytest.mark.parametrize("func", functions_of(Kind.DETACH), ids=name_of)
def test_what_detaches_gives_the_values_without_a_graph(func: Any) -> None:
    one = values().requires_grad_() * 2
    found = func(one)
    assert found.data_ptr() == one.data_ptr()
    assert found.grad_fn is None


@pytest.mark.parametrize("func", [f for f in functions_of(Kind.MOVE) if f.__name__ not in ("cuda", "xpu", "mtia")])
def test_what_moves_gives_the_tensor_itself_if_it_has_nothing_to_do(func: Any) -> None:
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}.get(func.__name__)
    more = (torch.ones(1, dtype=dtype),) if func in (Tensor.to, Tensor.type_as) else ()
    one = values().to(dtype or torch.float32)
    assert func(one, *more) is one
    assert moved_to(func, (one, *more), {}) == torch.device("cpu")
    assert func(one.char(), *more) is not one or func is Tensor.cpu


@pytest.mark.parametrize("func", functions_of(Kind.EXPORT), ids=name_of)
def test_what_exports_gives_the_memory_itself(func: Any) -> None:
    one = values()
    given = func(one)
    there = torch.from_numpy(given) if hasattr(given, "dtype") else torch.from_dlpack(given)
    there[0, 0] = 7
    assert one[0, 0] == 7


@pytest.mark.parametrize("func", functions_of(Kind.REFUSE), ids=name_of)
def test_what_gives_other_memory_does(func: Any) -> None:
    one = torch.ones(2, 2)
    other = torch.ones(64, 64)
    if "sparse" in name_of(func):
        one, other = torch.ones(2, 2).to_sparse(), torch.ones(64, 64).to_sparse()
    before = one.untyped_storage().data_ptr() if one.layout is torch.strided else one.shape
    more = {"resize_": (64, 64), "share_memory_": ()}.get(func.__name__, (other,))
    func(one, *more)
    assert (one.untyped_storage().data_ptr() if one.layout is torch.strided else one.shape) != before
    assert changed(func, (one,), {}) == (one,)


def test_what_is_given_as_out_is_changed_whatever_the_function_is() -> None:
    one, other = values(), torch.empty(4, 4)
    torch.add(one, 1, out=other)
    assert changed(torch.add, (one, 1), {"out": other}) == (other,)
    assert changed(torch.add, (one, 1), {}) == ()


def test_functions_of_lists_are_told_from_others() -> None:
    assert takes_lists(torch._foreach_add_)
    assert not takes_lists(torch.add)
    assert not takes_lists(Tensor.data.__get__)


def test_functions_that_are_made_anew_each_time_are_not_kept() -> None:
    before = len(torch_functions._kinds)
    for _ in range(3):

        def add_(one: Tensor) -> Tensor:
            return one

        assert kind_of(add_) is Kind.WRITE
    assert len(torch_functions._kinds) == before
