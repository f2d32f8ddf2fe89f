"""Compiled models: the values of an eager one, and a number of compilations that does not grow with the steps."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import offload
from offload import OffloadZero, Tuning, torch_private
from tests.oracle.models import Block, TinyLm, token_batches, token_loss
from tests.support.cases import often
from tests.support.toy import Mixed, Net, batch, squares, take_step

PLACEMENTS = {
    "resident": {"tier": "cpu"},
    "resident, pending": {"tier": "nvme"},
    "streamed": {"tier": "cpu", "param_tier": "cpu"},
    "streamed, pending": {"tier": "nvme", "param_tier": "nvme"},
}
ACTIVATIONS = {
    "recomputed": {"tier": "cpu", "activation_tier": "cpu"},
    "saved in a tier": {"tier": "nvme", "activation_tier": "nvme", "tuning": Tuning(recompute=False)},
}
ONE_GRAPH = {
    **PLACEMENTS,
    **ACTIVATIONS,
    "on the device": {"tier": "device"},
    "recomputed on the device": {"tier": "cpu", "activation_tier": "device"},
    "streamed, recomputed": {"tier": "cpu", "param_tier": "cpu", "activation_tier": "cpu"},
    "tiles": {"tier": "cpu", "param_tier": "cpu", "tuning": Tuning(tile=128)},
    "tiles, recomputed": {"tier": "cpu", "param_tier": "cpu", "activation_tier": "cpu", "tuning": Tuning(tile=128)},
}
WARM_UP = 2


Grads = list[Tensor | None]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def train(whole: bool, counter: Any, options: dict[str, Any] | None) -> tuple[list[float], list[int]]:
    """Losses, and how many graphs were compiled after each step."""
    torch.manual_seed(0)
    model = TinyLm()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options is not None:
        optimizer = OffloadZero(model, optimizer, compute_dtype=torch.float32, commit_every=None, **options)
    run: nn.Module = model
    if counter is not None and whole:
        run = torch.compile(model, backend=counter)  # type: ignore[assignment]
    elif counter is not None:
        for block in model.blocks:
            block.compile(backend=counter)
    losses, compiled = [], []
    for tokens, targets in token_batches():
        loss = token_loss(run, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimizer)
        losses.append(loss.item())
        compiled.append(0 if counter is None else counter.frame_count)
    if options is not None:
        optimizer.close()
    return losses, compiled


@pytest.mark.parametrize(
    "placement", [*PLACEMENTS, *(pytest.param(name, marks=pytest.mark.slow) for name in ACTIVATIONS)]
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by block"])
def test_a_compiled_model_learns_the_same_and_is_compiled_once(whole: bool, placement: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict((PLACEMENTS | ACTIVATIONS)[placement])
    if options["tier"] == "nvme":
        options["path"] = tmp_path / "run"
    expected, _ = train(whole, None, None)
    losses, compiled = train(whole, CompileCounter(), options)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert compiled[0] > 0
    assert compiled[WARM_UP:] == [compiled[WARM_UP]] * (len(compiled) - WARM_UP)


def compile_blocks(model: TinyLm, backend: Any, *, in_place: bool) -> None:
    for number, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend=backend, fullgraph=True)
        else:
            model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)  # type: ignore[assignment]


def train_blocks(
    backend: Any, options: dict[str, Any] | None, *, before: bool = True, in_place: bool = True
) -> tuple[list[float], Grads]:
    """Losses, and the gradients of the first step. Args: before: whether blocks are compiled before the model is held;
    in_place: by `block.compile`, or replaced by what `torch.compile` returns."""
    torch.manual_seed(0)
    model = TinyLm()
    if before:
        compile_blocks(model, backend, in_place=in_place)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options is not None:
        optimizer = OffloadZero(model, optimizer, compute_dtype=torch.float32, commit_every=None, **options)
    if not before:
        compile_blocks(model, backend, in_place=in_place)
    losses, grads = [], []
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        grads = grads or [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        take_step(optimizer)
        losses.append(loss.item())
    if options is not None:
        optimizer.close()
    return losses, grads


def in_folder(placement: str, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = dict(ONE_GRAPH[placement])
    return options | ({"path": folder / "run"} if options["tier"] == "nvme" else {})


@pytest.mark.parametrize(
    "placement",
    often(
        ONE_GRAPH, "resident", "streamed, pending", "saved in a tier", "recomputed on the device", "tiles, recomputed"
    ),
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "replaced"])
def test_blocks_of_one_graph_each_train_as_plain_ones(
    in_place: bool, before: bool, placement: str, tmp_path: Path
) -> None:
    plain, plain_grads = train_blocks("aot_eager", None, in_place=in_place)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    losses, grads = train_blocks(counter, in_folder(placement, tmp_path), before=before, in_place=in_place)
    has_tiles = "tiles" in placement
    assert counter.frame_count == (0 if has_tiles else 1)  # one graph serves all blocks
    assert len(grads) == len(plain_grads)
    for grad, expected in zip(grads, plain_grads, strict=True):
        assert grad is not None
        assert expected is not None
        # The gradient that enters a tiled weight's layer is a sum over tiles.
        assert torch.allclose(grad, expected, atol=1e-7) if has_tiles else torch.equal(grad, expected)
    assert losses == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("placement", ["recomputed", "streamed, recomputed"])
def test_a_recomputed_block_runs_compiled(placement: str, tmp_path: Path) -> None:
    runs = []

    def counting(graph: torch.fx.GraphModule, _: object) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    model = TinyLm()
    compile_blocks(model, counting, in_place=True)
    with OffloadZero(model, commit_every=None, **in_folder(placement, tmp_path)):
        tokens, targets = next(token_batches())
        loss = token_loss(model, tokens, targets)
        assert len(runs) == 3
        loss.backward()
    assert len(runs) == 6
    assert torch_private.set_frame_callback(None) is None  # what follows is not compiled


class DropoutBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.4, self.training)


def learn_with_dropout(
    compile_model: Callable[[TinyLm], nn.Module], options: dict[str, Any] | None
) -> tuple[list[Tensor], Tensor]:
    """Two losses and the gradients of the first, and the state of the random numbers after them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TinyLm()
    model.blocks = nn.ModuleList(DropoutBlock() for _ in model.blocks)
    held = None
    if options is not None:
        held = OffloadZero(model, compute_dtype=torch.float32, commit_every=None, **options)
    run = compile_model(model)
    (first, second), left = token_batches(2), []
    torch.manual_seed(1)
    loss = token_loss(run, *first)
    loss.backward()
    left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    left.append(token_loss(run, *second).detach())
    if held is not None:
        held.close()
    return left, torch.get_rng_state()


def assert_same_masks(
    found: tuple[list[Tensor], Tensor], expected: tuple[list[Tensor], Tensor], *, same_bits: bool
) -> None:
    """Requires what no other masks would give. Args: same_bits: whether rounding is the same, too."""
    assert torch.equal(found[1], expected[1])
    assert len(expected[0]) > 2
    for one, other in zip(found[0], expected[0], strict=True):
        if same_bits:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def compiled_whole(backend: str) -> Callable[[TinyLm], nn.Module]:
    return lambda model: torch.compile(model, backend=backend)  # type: ignore[return-value]


def compiled_by_block(model: TinyLm) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="inductor")
    return model


@pytest.fixture
def _inductor() -> Iterator[None]:
    """The default backend builds its kernels in this process, which needs a C++ compiler."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    with torch._inductor.config.patch(compile_threads=1):
        yield


def test_dropout_of_a_model_compiled_without_kernels_has_the_masks_of_the_plain_model(tmp_path: Path) -> None:
    plain = learn_with_dropout(lambda model: model, None)
    held = learn_with_dropout(compiled_whole("aot_eager"), in_folder("streamed, recomputed", tmp_path))
    assert_same_masks(held, plain, same_bits=True)


def test_dropout_of_a_block_in_tiles_has_the_masks_of_the_plain_block(tmp_path: Path) -> None:
    plain = learn_with_dropout(lambda model: model, None)
    held = learn_with_dropout(compiled_by_block, in_folder("tiles, recomputed", tmp_path))
    assert_same_masks(held, plain, same_bits=False)


DROPOUT = ["resident", "streamed, pending", "saved in a tier", "streamed, recomputed"]


@pytest.mark.slow
@pytest.mark.usefixtures("_inductor")
@pytest.mark.parametrize("placement", DROPOUT)
def test_dropout_of_compiled_blocks_has_the_masks_of_plain_compiled_blocks(placement: str, tmp_path: Path) -> None:
    plain = learn_with_dropout(compiled_by_block, None)
    assert_same_masks(learn_with_dropout(compiled_by_block, in_folder(placement, tmp_path)), plain, same_bits=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_inductor")
@pytest.mark.parametrize("placement", DROPOUT[1:])
def test_dropout_in_blocks_of_a_model_compiled_as_a_whole_has_the_same_masks_in_every_placement(
    placement: str, tmp_path: Path
) -> None:
    resident = learn_with_dropout(compiled_whole("inductor"), in_folder("resident", tmp_path))
    held = learn_with_dropout(compiled_whole("inductor"), in_folder(placement, tmp_path))
    # What lies around the blocks is compiled where parameters stream.
    assert_same_masks(held, resident, same_bits="streamed" not in placement)


@pytest.mark.slow
@pytest.mark.usefixtures("_inductor")
def test_dropout_with_the_random_numbers_of_torch_has_the_masks_of_the_plain_model(tmp_path: Path) -> None:
    plain = learn_with_dropout(lambda model: model, None)
    with torch._inductor.config.patch(fallback_random=True):
        held = learn_with_dropout(compiled_whole("inductor"), in_folder("streamed, recomputed", tmp_path))
    assert_same_masks(held, plain, same_bits=False)


def test_modules_of_a_unit_without_a_forward_enter_it_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, entered = Mixed(), []  # its units are ModuleDicts
    with OffloadZero(model, tier="cpu", param_tier="cpu", compute_dtype=torch.float32, commit_every=None) as optimizer:
        x = torch.randn(4, 12)
        expected, running = model(x), optimizer._held.units.running
        enter = running.enter
        monkeypatch.setattr(running, "enter", lambda unit: (entered.append(unit.name), enter(unit)))
        assert torch.equal(torch.compile(model, backend="eager")(x), expected)
    assert {"stages.0", "stages.3"} <= set(entered)


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
def test_blocks_with_modules_in_fp32_are_one_graph(param_tier: str) -> None:
    model, counter = Net(12), CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    options: dict[str, Any] = {"tier": "cpu", "param_tier": param_tier, "keep_fp32": [nn.LayerNorm]}
    with OffloadZero(model, commit_every=None, **options) as optimizer:
        take_step(optimizer, squares(model))
        take_step(optimizer, squares(model))
    assert counter.frame_count == 1


def test_a_forward_that_was_compiled_in_its_unit_fetches_outside_of_it() -> None:
    model, x = Net(), torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    expected = model.blocks[1](x)
    forward = torch.compile(model.blocks[1].forward, backend="eager")
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    with OffloadZero(model, tier="cpu", param_tier="cpu", compute_dtype=torch.float32, commit_every=None):
        for _ in range(2):
            model(batch(0))
            assert torch.equal(forward(x), expected)


@pytest.mark.parametrize("placement", ["streamed", "recomputed"])
def test_a_whole_model_in_one_graph_names_the_way_out(placement: str, tmp_path: Path) -> None:
    model = TinyLm()
    with OffloadZero(model, commit_every=None, **in_folder(placement, tmp_path)):
        whole = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Unsupported, match=r"block\.compile\(fullgraph=True\)") as caught:
            whole(next(token_batches())[0])
        assert "give torch.compile(model) no fullgraph=True" in str(caught.value)


def test_a_model_with_an_embedding_in_tiles_in_one_graph_names_the_way_out(tmp_path: Path) -> None:
    model = TinyLm()
    with OffloadZero(model, commit_every=None, **in_folder("tiles", tmp_path)):
        whole = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Unsupported, match="leave out fullgraph=True where such a use is compiled"):
            whole(next(token_batches())[0])


@pytest.mark.parametrize(
    "placement", often(["resident", "streamed", "recomputed", "saved in a tier"], "streamed", "saved in a tier")
)
def test_a_training_step_is_compiled_as_a_whole_without_what_this_library_does(placement: str, tmp_path: Path) -> None:
    def losses(*, compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = TinyLm()
        with OffloadZero(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            compute_dtype=torch.float32,
            commit_every=None,
            **in_folder(placement, tmp_path),
        ) as optimizer:

            def step(tokens: Tensor, targets: Tensor) -> Tensor:
                optimizer.zero_grad()
                loss = token_loss(model, tokens, targets)
                loss.backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                return loss.detach()

            run = torch.compile(step, backend="eager") if compiled else step
            return [run(*batch).item() for batch in token_batches()]

    clear_compilation_metrics()
    assert losses(compiled=True) == losses(compiled=False)
    frames = {(str(one.co_filename), one.co_name) for one in get_compilation_metrics()}
    assert (__file__, "step") in frames
    # Casts of what enters the model are a part of it.
    assert {Path(file).name for file, _ in frames if is_ours(file)} <= {"hooks.py"}


def is_ours(file: str) -> bool:
    return Path(file).is_relative_to(Path(offload.__file__).parent)


def test_a_use_outside_of_its_unit_in_one_graph_names_the_way_out() -> None:
    model = TinyLm()
    with OffloadZero(model, tier="cpu", param_tier="cpu", commit_every=None):
        use = torch.compile(lambda x: x * model.norm.weight, backend="eager", fullgraph=True)
        with pytest.raises(Unsupported, match="leave out fullgraph=True where such a use is compiled"):
            use(torch.ones(8))
