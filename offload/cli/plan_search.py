"""`offload plan --search`: the placements that no other one beats on a machine, as a table and as a picture.

[Note: how it searches]
All tiers, states and shares of states in RAM are planned with one chunk size, and without accumulation; what is not
open stays as it was given. Planning says which of them fit, and what they hold and move, which gives the least time
that each can take (simulate/bound.py). Those that could be the best are simulated first, and what no longer can be on
the front then is not simulated, or not to the end: a step's seconds are known before those of a commit. The rows of the
front that are best for the goal are then changed in one thing at a time (chunk, accumulation, split masters, half of
the device's memory), as long as that brings better ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.console import plain_console, print_json, say, show_table
from offload.cli.options import GOALS, LARGEST, LEAST, MOST_BLOCKS, STATES, PlanOptions
from offload.cli.plan import (
    arguments_of,
    beside_of,
    computing_of,
    planned_of,
    rates_of,
    resources_beside,
    speeds_for,
    verdict_of,
    waiting_of,
    work_of,
)
from offload.cli.plan_models import rules_named, sized
from offload.cli.plan_time import predicted
from offload.cli.plots import new_figure, write
from offload.cli.progress import progress
from offload.errors import BudgetError, ConfigError
from offload.planner.front import Costs, Front, Fronts, IsBeaten
from offload.planner.machine import free_memory
from offload.planner.simulate import NotPredicted
from offload.planner.simulate.bound import least_seconds
from offload.planner.simulate.what_if import passes_of
from offload.sizes import GIB, format_bytes, option_bytes, parse_bytes
from offload.tiers import TIERS

if TYPE_CHECKING:
    from rich.console import Console

    from offload.cli.plan_models import Sized
    from offload.planner.activations import Waiting
    from offload.planner.explain import Planned
    from offload.planner.placement import Placement
    from offload.planner.simulate.speeds import Passes, Speeds

SHARES = (0.0, 0.5, 1.0)
"""Of the RAM between the least that works and all that there is."""
CHUNKS = ("4MiB", "16MiB", "64MiB", "256MiB")
FIRST_CHUNK = "64MiB"
ACCUMULATIONS = (1, 4, 16)
ROUNDS, CHANGED = 3, 6
"""How often rows are changed in one thing, and how many: the best ones."""
OBJECTS = 1 << 16
"""That are made between two looks for garbage in cycles: simulations make few."""
MOST_ROWS = 24
"""That people are shown."""
OPEN = ("tier", "param_tier", "grad_tier", "activation_tier", "states", "chunk", "accumulation", "split_master")
"""Options of the command that are searched, unless they are given."""
REFUSED = "refused"
"""What OffloadZero does with a candidate, where it is not that it lacks something."""
LACKS = {"device_memory": "device", "gpu_memory": "device", "cpu_memory": "RAM"}
"""What a candidate lacks, in a word for its count, by the option of its error."""


@dataclass(frozen=True)
class Candidate:
    """A run that fits.

    Attributes:
        options: of the command for it.
        planned: its plan.
        placement: what is where.
        sums: what it takes of memory and disk with all that is not in the plan.
    """

    options: PlanOptions
    planned: Planned
    placement: Placement
    sums: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.options.batch * self.options.seq * self.planned.choice.grads.micro_batches


@dataclass
class Refusals:
    """Candidates that do not fit, or that OffloadZero refuses.

    Attributes:
        counts: how many, by what they lack, or REFUSED.
        least: the error of the one that lacks least; None: there is none.
        refused: the first error of those that OffloadZero refuses; None: it refuses none.
    """

    counts: dict[str, int] = field(default_factory=dict)
    least: BudgetError | None = None
    refused: ConfigError | None = None

    def add(self, what: str) -> None:
        """Counts one that lacks something."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def add_error(self, error: BudgetError | ConfigError) -> None:
        """Counts one that has an error."""
        if isinstance(error, ConfigError):
            self.add(REFUSED)
            self.refused = self.refused or error
            return
        self.add(LACKS.get(error.option, error.option))
        if self.least is None or _lack(error) < _lack(self.least):
            self.least = error

    def in_words(self) -> str:
        """How many, by what they lack: "2 lack RAM, 3 are refused"."""
        return ", ".join(
            f"{count} {'are refused' if what == REFUSED else f'lack {what}'}" for what, count in self.counts.items()
        )


def _lack(error: BudgetError) -> float:
    return error.needed / max(error.available, 1)


class Search:
    """The placements of one model on one machine.

    Args:
        options: of the command.
        model: the model.
        waiting: what waits of a micro-batch for its backward; None: that is unknown.
        searched: which of OPEN are searched.
    """

    def __init__(self, options: PlanOptions, model: Sized, waiting: Waiting | None, searched: frozenset[str]) -> None:
        self._options, self._model, self._waiting = options, model, waiting
        self._searched = searched
        self.refusals = Refusals()
        self._seen: set[tuple[Any, ...]] = set()
        self._flops = rates_of(options)[0]["flops"]
        self._bounds: dict[int, Costs] = {}
        self._found: dict[int, dict[str, Any]] = {}
        self._speeds: dict[tuple[str, bool], Speeds | NotPredicted] = {}
        self._has_frozen = any(not param.requires_grad for param in model.module.parameters())
        can_split = rules_named(options.optimizer, options.states)[0].splits_masters
        self._splits = can_split and replace(options, split_master=True).splits_masters

    # What there is to choose from.

    def placements(self, chunk: str) -> list[PlanOptions]:
        """The options of all tiers and states, with one chunk size."""
        options = self._options
        values = {
            "tier": ("nvme", "cpu", "device") if options.gpu else ("nvme", "cpu"),
            "param_tier": ("device", "cpu", "nvme"),
            "grad_tier": ("cpu", "nvme"),
            "activation_tier": (None, "device", "cpu", "nvme"),
            "states": STATES if self._has_forms() else ("fp32",),
            "chunk": (chunk,),
            "accumulation": ACCUMULATIONS[:1],
        }
        names = [name for name in values if name in self._searched]
        made: list[dict[str, Any]] = [
            dict(zip(names, one, strict=True)) for one in product(*(values[name] for name in names))
        ]
        found = [replace(options, **one) for one in made]
        # Where none is, OffloadZero says why.
        return [one for one in found if _is_possible(one, has_frozen=self._has_frozen)] or found

    def _has_forms(self) -> bool:
        """Whether the optimizer can keep its states in fewer bits."""
        with suppress(ConfigError):
            rules_named(self._options.optimizer, "8bit")
            return True
        return False

    def neighbours(self, one: Candidate) -> Iterator[PlanOptions]:
        """The options that differ from those of a candidate in one thing, but in tiers and states."""
        options = one.options
        steps: list[tuple[str, tuple[Any, ...]]] = [("chunk", CHUNKS), ("accumulation", ACCUMULATIONS)]
        for name, values in steps:
            if name in self._searched:
                at = values.index(getattr(options, name))
                for other in values[max(at - 1, 0) : at + 2]:
                    changed: dict[str, Any] = {name: other}
                    yield replace(options, **changed)
        if "split_master" in self._searched and self._splits and options.tier == "nvme":
            yield replace(options, split_master=not options.split_master)
        if one.placement.device_budget_bytes and options.gpu_bytes and self._options.device_memory is None:
            half = one.placement.device_budget_bytes // 2
            if options.device_memory is None and half:
                yield replace(options, device_memory=f"{half}B")

    # Which of it fits.

    def candidates(self, variants: Sequence[PlanOptions], tell: Any = None) -> list[Candidate]:
        """What fits of some options, with several budgets of RAM where that is open. None comes twice."""
        found = []
        for number, options in enumerate(variants, 1):
            found += list(self._fitting(options))
            if tell is not None:
                tell(number, f"{len(self._seen)} candidates, {len(found)} fit")
        return found

    def _fitting(self, options: PlanOptions) -> Iterator[Candidate]:
        key = tuple(getattr(options, name) for name in (*OPEN, "device_memory"))
        if key in self._seen:
            return
        self._seen.add(key)
        most = self._most_ram()
        try:
            planned = planned_of(replace(options, cpu_memory=None), self._model, self._waiting)
            least = planned.least()
        except (BudgetError, ConfigError) as error:
            self.refusals.add_error(error)
            return
        shares = SHARES if options.tier == "nvme" and options.cpu_memory != LEAST else SHARES[:1]
        budgets = sorted({min(least, most) + round(share * max(most - least, 0)) for share in shares})
        if options.tier == "nvme":  # more than all of it is no use
            with suppress(BudgetError):
                everything = planned.cpu_memory_for(1.0)
                budgets = sorted({min(budget, everything) for budget in budgets})
        for budget in budgets:
            with_budget = planned.with_memory(budget)
            try:
                placement = with_budget.place()
            except (BudgetError, ConfigError) as error:
                self.refusals.add_error(error)
                continue
            sums = self._sums(options, with_budget, placement)
            if sums["fits"]:
                yield Candidate(options, with_budget, placement, sums)
            else:
                self.refusals.add(_lacking_of(sums))

    def _most_ram(self) -> int:
        options = self._options
        free = free_memory() if options.free_cpu_bytes is None else options.free_cpu_bytes
        if options.cpu_memory in (None, LEAST):
            return free
        return min(free, parse_bytes(options.cpu_memory, "--cpu-memory"))

    def _sums(self, options: PlanOptions, planned: Planned, placement: Placement) -> dict[str, Any]:
        found = {
            "device": "cpu" if planned.direct else "gpu",
            "device_bytes": placement.device_bytes,
            "peak_cpu_bytes": placement.arena_bytes,
            "disk_bytes": placement.disk_bytes,
        }
        computing = computing_of(options, self._model, self._waiting)
        return verdict_of(found, options, computing, resources_beside(options, self._model))

    # What it costs.

    def speeds(self, options: PlanOptions) -> Speeds | NotPredicted:
        """Those of the machine for an optimizer's form of states."""
        key = options.states, options.splits_masters
        if key not in self._speeds:
            self._speeds[key] = speeds_for(options)
        return self._speeds[key]

    def at_best(self, one: Candidate) -> Costs:
        """The least that a candidate can cost."""
        if id(one) not in self._bounds:
            self._bounds[id(one)] = self._bound(one)
        return self._bounds[id(one)]

    def _bound(self, one: Candidate) -> Costs:
        speeds, seconds = self.speeds(one.options), 0.0
        if not isinstance(speeds, NotPredicted) and self._flops is not None:
            work, beside = work_of(one.planned, one.options, self._model), self._beside(one)
            passes = passes_of(one.planned.layout, work, self._flops, beside)
            seconds = least_seconds(one.planned.layout, one.placement, passes, speeds)
        return self._costs(one, seconds, one.placement.written_bytes)

    def find(self, one: Candidate, is_beaten: IsBeaten) -> Costs | str | None:
        """What a candidate costs, simulated; or in words why that is not known.

        Args:
            one: the candidate.
            is_beaten: see `Fronts`. Asked once the seconds of a step without commits are known.

        Returns:
            None: it is beaten.
        """

        def is_enough(seconds: float) -> bool:
            self._bounds[id(one)] = least = self._costs(one, seconds, one.placement.written_bytes)
            return is_beaten(least)

        found = self._predicted(one, is_enough)
        if found["predicted"] is not None:
            self._found[id(one)] = found
            return self._costs(one, found["predicted"]["seconds"], found["predicted"]["written_bytes"])
        return None if found["not_predicted"] is None else str(found["not_predicted"])

    def figures(self, one: Candidate) -> dict[str, Any]:
        """What is predicted for a candidate; see `plan_time.predicted`."""
        if id(one) not in self._found:
            self._found[id(one)] = self._predicted(one, lambda seconds: False)
        return self._found[id(one)]

    def _predicted(self, one: Candidate, is_enough: Callable[[float], bool]) -> dict[str, Any]:
        work, speeds = work_of(one.planned, one.options, self._model), self.speeds(one.options)
        beside = self._beside(one)
        return predicted(one.planned, work, self._flops, speeds, beside, hides=False, is_enough=is_enough)

    def _beside(self, one: Candidate) -> Passes:
        return beside_of(one.planned, one.options, self._model, self._waiting)

    def _costs(self, one: Candidate, seconds: float, written_bytes: float) -> Costs:
        return Costs(
            seconds / one.tokens,
            0.0 if one.planned.direct else one.sums["device_total_bytes"],
            one.sums["cpu_total_bytes"],
            one.placement.disk_bytes,
            written_bytes / one.tokens,
            STATES.index(one.options.states),
        )

    def call(self, one: Candidate) -> str:
        """The call of OffloadZero that makes a candidate."""
        given = arguments_of(replace(one.options, cpu_memory=None), self._model, self._waiting)
        given["cpu_memory"] = None if one.planned.room.cpu_memory is None else option_bytes(one.planned.room.cpu_memory)
        return call_of(given)


def call_of(given: dict[str, Any]) -> str:
    """A call of OffloadZero, with what is not its default."""
    import inspect

    from offload import OffloadZero, Tuning

    defaults = {name: one.default for name, one in inspect.signature(OffloadZero).parameters.items()}
    words = []
    for name, value in given.items():
        if name == "tuning":
            changed = {one: getattr(value, one) for one in ("chunk", "split_master", "speculate")}
            changed = {one: option for one, option in changed.items() if option and option != getattr(Tuning(), one)}
            if changed:
                words.append(
                    f"tuning=Tuning({', '.join(f'{one}={_literal(option)}' for one, option in changed.items())})"
                )
        elif value != defaults[name]:
            words.append(f"{name}=PATH" if name == "path" else f"{name}={_literal(_in_bytes(name, value))}")
    return ", ".join(["OffloadZero(model, optimizer", *words]) + ")"


def _in_bytes(name: str, value: Any) -> Any:
    """Bytes as people write them; of a budget never more than there is."""
    if not isinstance(value, int) or not name.endswith("memory"):
        return value
    return option_bytes(value, at_most=name == "device_memory")


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _is_possible(options: PlanOptions, *, has_frozen: bool) -> bool:
    """Whether these tiers go together: of what is trained, nothing waits on a slower tier than its states.

    Args:
        options: with the tiers.
        has_frozen: whether some parameters are frozen, which may wait anywhere.
    """
    if not has_frozen and TIERS[options.param_tier] > TIERS[options.tier]:
        return False
    if options.tier != "nvme":
        return options.grad_tier == "cpu"  # which is the device where the states are there
    return not (options.gpu and options.param_tier == "device" and options.grad_tier == "nvme")


def _lacking_of(sums: dict[str, Any]) -> str:
    return "device" if not sums["fits_device"] else "disk" if not sums["fits_disk"] else "RAM"


ORDERS = {
    "fastest": lambda costs: (costs.token_s, costs.written_bytes),
    "least-wear": lambda costs: (costs.written_bytes, costs.token_s),
    "largest": lambda costs: (costs.token_s, costs.written_bytes),
}
assert ORDERS.keys() == set(GOALS)


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        search: its model and machine, and what was refused.
        model: the model.
        front: see `Front`.
        fitting: all candidates that fit.
    """

    search: Search
    model: Sized
    front: Front[Candidate]
    fitting: Sequence[Candidate]


def searched(options: PlanOptions, given: frozenset[str], console: Console) -> Found:
    """Searches for a goal.

    Args:
        options: the options of the command.
        given: the names of those that the user gave.
        console: where progress is shown.

    Raises:
        ConfigError: OffloadZero refuses all of it, or no time can be predicted on this machine.
        BudgetError: nothing fits.
    """
    left_open = {name for name in ("param_tier", "grad_tier") if getattr(options, name) == "auto"}
    names = frozenset(OPEN) - (given - left_open)
    for option, count in (("--ranks", options.ranks), ("--tensor-parallel", options.tensor_parallel)):
        if count > 1:
            raise ConfigError(f"--search is for one rank, and {option} {count} for several: leave one of the two out")
    if options.goal == LARGEST:
        if options.layers is not None:
            raise ConfigError(f"--goal largest looks for the number of blocks, and --layers {options.layers} says it")
        options = _at_most_blocks(options, names, console)
    model = sized(options)
    waiting = waiting_of(options, model)
    search = Search(options, model, waiting, names)
    if isinstance(speeds := search.speeds(options), NotPredicted):
        raise ConfigError(f"--search: no time can be predicted: {speeds.reason}")
    if search._flops is None:
        raise ConfigError("--search: how fast this device computes is not known: --flops gives it, or `offload probe`")
    with _few_collections():
        return _found(search, options, model, console)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Inside, Python looks for garbage in cycles less often, and not in what imports have made: that is most of it."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _found(search: Search, options: PlanOptions, model: Sized, console: Console) -> Found:
    """What a search finds; see `searched`."""
    fitting: list[Candidate] = []
    for chunk in (FIRST_CHUNK, *CHUNKS):
        variants = search.placements(chunk)
        with progress(console, "planned", len(variants)) as tell:
            fitting = search.candidates(variants, tell)
        if fitting:
            break
    if not fitting:
        raise _nothing_fits(search)
    fronts = Fronts(search.at_best, search.find, ORDERS[options.goal or GOALS[0]])
    front = _front(fronts, fitting, len(fitting), console)
    changed: set[int] = set()
    for _ in range(ROUNDS):
        best = [one for one, _ in front.rows if id(one) not in changed][:CHANGED]
        changed |= {id(one) for one in best}
        more = search.candidates([other for one in best for other in search.neighbours(one)])
        if not more:
            break
        fitting += more
        front = _front(fronts, more, len(fitting), console)
    if not front.rows:
        raise ConfigError(f"--search: no time can be predicted: {', '.join(front.unknown)}")
    return Found(search, model, front, fitting)


def _front(
    fronts: Fronts[Candidate], candidates: Sequence[Candidate], fitting: int, console: Console
) -> Front[Candidate]:
    """The front with some candidates more, so that so many fit, and progress on the console."""
    with progress(console, "simulated", fitting) as tell:
        return fronts.of(candidates, lambda known: tell(known, f"of {fitting} that fit"))


def _nothing_fits(search: Search) -> Exception:
    found = search.refusals
    if found.least is not None:
        return found.least
    if found.refused is not None and found.counts.keys() == {REFUSED}:
        return found.refused
    return ConfigError(f"--search: none of {sum(found.counts.values())} candidates fits: {found.in_words()}")


def _at_most_blocks(options: PlanOptions, names: frozenset[str], console: Console) -> PlanOptions:
    """The options of the largest model that fits anywhere: with as many blocks as that.

    What does not fit with so many blocks does not with more, and is not tried again.

    Raises:
        BudgetError: not even one block fits.
        ConfigError: no number of blocks is too many.
    """

    def fitting(blocks: int, variants: list[PlanOptions]) -> list[PlanOptions]:
        larger = replace(options, layers=blocks)
        model = sized(larger)
        search = Search(larger, model, waiting_of(larger, model), names)
        for some in [variants] if variants else map(search.placements, (FIRST_CHUNK, *CHUNKS)):
            if found := [one for one in some if search.candidates([replace(one, layers=blocks)])]:
                return found
        return []

    low, high = 0, max(options.frozen, 1)
    alive: list[PlanOptions] = []
    with progress(console, "blocks", MOST_BLOCKS.bit_length()) as tell:
        while (found := fitting(high, alive)) and high < MOST_BLOCKS:
            low, high, alive = high, 2 * high, found
            tell(low.bit_length(), f"{low} blocks fit")
        if high >= MOST_BLOCKS:
            raise ConfigError(
                f"--goal largest: {MOST_BLOCKS} blocks fit: give --width, or what the machine has, with --ram"
            )
        while high - low > 1 and low:
            middle = (low + high) // 2
            if found := fitting(middle, alive):
                low, alive = middle, found
            else:
                high = middle
            tell(MOST_BLOCKS.bit_length() - 1, f"{low} blocks fit")
    return replace(options, layers=low or high)


# What people and machines see of it.


def rows_of(found: Found) -> list[dict[str, Any]]:
    """The figures of each row of the front, as --json prints them."""
    rows = []
    for one, costs in found.front.rows:
        figures = found.search.figures(one)["predicted"]
        choice = one.planned.choice
        rows.append(
            {
                "call": found.search.call(one),
                "tier": choice.states.tier.name,
                "param_tier": choice.params.tier.name,
                "frozen_tier": choice.params.frozen_tier.name if choice.params.has_frozen else None,
                "grad_tier": choice.grads.tier.name,
                "activation_tier": one.options.activation_tier,
                "states": choice.states.form,
                "split_master": choice.states.split_master,
                "chunk": one.options.chunk,
                "accumulation": choice.grads.declared,
                "cpu_memory": one.planned.room.cpu_memory,
                "device_memory": one.placement.device_budget_bytes,
                "seconds": figures["seconds"],
                "tokens_per_s": 1 / costs.token_s,
                "waits_for": figures["waits_for"],
                "parts_s": figures["parts_s"],
                "device_bytes": int(costs.device_bytes),
                "cpu_bytes": int(costs.cpu_bytes),
                "disk_bytes": int(costs.disk_bytes),
                "written_bytes": figures["written_bytes"],
                "written_bytes_per_token": costs.written_bytes,
            }
        )
    return rows


def show_search(options: PlanOptions, given: frozenset[str], picture: Path | None, *, json: bool) -> None:
    """Prints the front, and draws it.

    Args:
        options: the options of the command.
        given: the names of those that the user gave.
        picture: a PNG to write; None: none.
        json: whether to print one JSON object.

    Raises:
        ConfigError: see `searched`; or the picture cannot be written.
        BudgetError: nothing fits.
    """
    found = searched(options, given, plain_console(stderr=True))
    rows = rows_of(found)
    unknown = {reason: len(ones) for reason, ones in found.front.unknown.items()}
    if picture is not None:
        draw(picture, _title(found), rows)
    if json:
        print_json(
            {
                "goal": options.goal or GOALS[0],
                "parameters": found.model.numel,
                "blocks": found.model.blocks,
                "tokens": options.batch * options.seq,
                "front": rows,
                "candidates": len(found.fitting) + sum(found.search.refusals.counts.values()),
                "skipped": found.front.skipped,
                "beaten": found.front.beaten,
                "not_predicted": unknown,
                "not_fitting": found.search.refusals.counts,
            }
        )
        return
    _show(plain_console(), found, rows, options, unknown)


def _title(found: Found) -> str:
    return f"{found.model.numel:,} parameters in {found.model.blocks} blocks"


def _show(
    console: Console, found: Found, rows: list[dict[str, Any]], options: PlanOptions, unknown: dict[str, int]
) -> None:
    from rich.table import Table

    first = GOALS[0] if options.goal in (None, LARGEST) else options.goal
    table = Table(title=f"{_title(found)}: the front, {first} first; predicted", title_justify="left")
    for name in ("", "states", "parameters", "gradients", "activations", "form", "chunk", "acc"):
        table.add_column(name)
    for name in ("a step", "tokens/s", "waits for", "device", "RAM", "disk", "written a step"):
        table.add_column(name, justify="right")
    for number, one in enumerate(rows[:MOST_ROWS], 1):
        table.add_row(
            f"{number}", one["tier"], _tier_of_params(one), one["grad_tier"], one["activation_tier"] or "saved",
            one["states"] + (", split" if one["split_master"] else ""), one["chunk"] or FIRST_CHUNK,
            f"{one['accumulation']}", f"{one['seconds']:.3g} s", f"{one['tokens_per_s']:,.0f}", one["waits_for"],
            format_bytes(one["device_bytes"]) if one["device_bytes"] else "-", format_bytes(one["cpu_bytes"]),
            format_bytes(one["disk_bytes"]) if one["disk_bytes"] else "-",
            format_bytes(round(one["written_bytes"])) if one["written_bytes"] else "-",
        )  # fmt: skip
    show_table(console, table)
    for number, one in enumerate(rows[:MOST_ROWS], 1):
        say(console, f"{number}: {one['call']}")
    if len(rows) > MOST_ROWS:
        say(console, f"{len(rows) - MOST_ROWS} more rows are on the front: --json has them.")
    if any(one["states"] != "fp32" for one in rows):
        say(console, "bf16 and 8bit states are another training: --states fp32 leaves them out. So is another")
        say(console, "accumulation, which makes larger batches: --accumulation keeps yours.")
    refused, lacks = sum(found.search.refusals.counts.values()), found.search.refusals.in_words()
    say(
        console,
        f"Beside these, {found.front.beaten} are beaten by a row, {found.front.skipped} cannot be better than one, "
        f"and {refused} do not fit{f': {lacks}' if lacks else ''}.",
    )
    for reason, count in unknown.items():
        say(console, f"{count} that fit are not predicted: {reason}.")


def _tier_of_params(row: dict[str, Any]) -> str:
    frozen = row["frozen_tier"]
    return row["param_tier"] if frozen is None else f"{row['param_tier']}, frozen {frozen}"


def draw(file: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a PNG: tokens/s of each row by its RAM, its device memory, and the bytes that it writes.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(11, 4.2)
    figure.suptitle(f"{title}: the front, predicted")
    every = (
        ("cpu_bytes", "RAM"),
        ("device_bytes", "device"),
        ("disk_bytes", "disk"),
        ("written_bytes", "written a step"),
    )
    kinds = [kind for kind in every if any(one[kind[0]] for one in rows)]
    colours = {"nvme": "#54a24b", "cpu": "#f58518", "device": "#4c78a8"}
    markers = dict(zip(STATES, ("o", "s", "^"), strict=True))
    parts = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, (key, name) in zip(parts, kinds, strict=True):
        for form, marker in markers.items():
            for tier, colour in colours.items():
                there = [one for one in rows if (one["tier"], one["states"]) == (tier, form)]
                if there:
                    x, y = [one[key] / GIB for one in there], [one["tokens_per_s"] for one in there]
                    axes.scatter(x, y, color=colour, marker=marker, s=28, label=f"{tier}, {form}")
        axes.set(xlabel=f"{name} (GiB)")
        largest = max(one[key] for one in rows) / GIB
        axes.set_xlim(-0.05 * largest, 1.08 * largest)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    parts[0].set(ylabel="tokens/s")
    parts[-1].legend(title="states on, form", fontsize="small")
    write(figure, file)
