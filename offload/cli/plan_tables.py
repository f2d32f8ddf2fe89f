"""What `offload plan` shows to people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from offload.cli.console import printable, say, show_table
from offload.cli.options import PlanOptions
from offload.cli.plan_models import Sized
from offload.planner.activations import TILE
from offload.planner.placement import TYPICAL_TBW, in_words, life_in_words
from offload.sizes import format_bytes, option_bytes
from offload.tiers import CPU, DEVICE, NVME, TIERS

KINDS = {
    "param": "what the model computes with",
    "frozen": "frozen parameters, and buffers of the model",
    "grad": "gradients, sums of squares, bounces",
    "master": "fp32 masters",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "activation": "what enters blocks, on its way to their backward",
    "buffers": "what streamed chunks pass through",
    "slots": "reserved for chunks that stay in RAM",
    "rest": "headers, padding, buffers of copies",
}
COMMITTED_SLOTS = "a second version of each chunk, for commits"
WORDS = {
    "given": "given",
    "assumed": "assumed",
    "measured": "measured here",
    "elsewhere": "measured there",
    "described": "described, not measured",
}
"""Where a figure is from."""


def show(console: Console, summary: dict[str, Any], options: PlanOptions, model: Sized) -> None:
    """Prints the verdict, then what lies where, then what other budgets would do."""
    for line in (*machine_lines(options), *_verdict(summary, options)):
        say(console, line)
    for line in _predicted_lines(summary):
        say(console, line)
    if summary["predicted"] is not None:
        show_table(console, _parts_table(summary["predicted"]))
    console.print()
    show_table(console, _placement_table(summary))
    if summary["ranks"] > 1:
        show_table(console, _rank_table(summary))
    if "zero_r" in summary:
        show_table(console, _zero_r_table(summary, model.blocks))
    for line in (*_lines(summary), _activation_line(summary, options, model)):
        say(console, line)
    if summary.get("unquantised"):
        left = in_words(summary["unquantised_bytes"], summary["unquantised"]).rstrip("; ")
        say(console, f"Frozen parameters: {left}.")
    console.print()
    show_budgets(console, summary)


def machine_lines(options: PlanOptions) -> Iterator[str]:
    """What machine that is, and how much is known of it."""
    from offload.io.remembered import LONGEST_AGE_S, days
    from offload.planner.machine_file import unused

    machine = options.machine
    if machine is None:
        if not options.is_elsewhere and (why := unused()) is not None:
            yield f"What `offload probe` measured {why}: it is not used. `offload probe` measures again."
        return
    about = f": {machine.about}" if machine.about else ""
    age = machine.age_s()
    if age is None:
        yield f"For {machine.name}{about}. Nothing was measured there: figures are those of data sheets, or assumed."
        return
    where = "this machine" if machine.is_here else "another machine than this one"
    old = ", which is stale: `offload probe --save` writes it anew" if age > LONGEST_AGE_S else ""
    yield f"For {machine.name}{about}. It is {where}, measured {days(max(age, 0))} ago{old}."


def show_budgets(console: Console, summary: dict[str, Any]) -> None:
    show_table(console, _budget_table(summary))
    share, free = summary["largest_share"], format_bytes(summary["free_cpu_bytes"])
    fits = "not even the least fits" if share is None else f"{share:.0%} of the states fit"
    say(console, f"In {free} of free RAM, {fits}.")


def _verdict(summary: dict[str, Any], options: PlanOptions) -> Iterator[str]:
    """Whether it fits, how long a step takes, how long the drive lasts."""
    ram = f"{format_bytes(summary['cpu_total_bytes'])} of RAM, {format_bytes(summary['free_cpu_bytes'])} are free"
    disk = f", {format_bytes(summary['disk_bytes'])} of disk" if summary["disk_bytes"] else ""
    verdict = "yes" if summary["fits"] else "no"
    card = ""
    if options.gpu:
        total, has = format_bytes(summary["device_total_bytes"]), summary["gpu_bytes"]
        card = f"{total} of the GPU" + ("; " if has is None else f"'s {format_bytes(has)}; ")
        if has is None and summary["fits"]:
            verdict = f"yes, on a GPU of {total} or more"
            card = ""
    if summary["activation_bytes"] is None:
        verdict += ", but for activations, which are not known and not counted"
    yield f"Fits: {verdict}. It takes {card}{ram}{disk}."
    if not summary["fits"]:
        yield _way_out(summary, options)
    yield from _spared_lines(summary)
    if "step_seconds" in summary:
        yield _step_line(summary)
        if summary["speculate_gain"] is not None:
            yield _trials_line(summary)
    elif summary["disk_seconds"]:
        disk_rate = f"{summary['disk_gb_per_s']:.3g} GB/s, {WORDS[summary['disk_from']]}"
        yield f"A step takes at least {_seconds(summary['disk_seconds'])}, the disk's time ({disk_rate})."
    if "update_flops" in summary:
        yield _update_line(summary)
    if summary["drive_life_steps"] is not None:
        full = summary.get("budgets", [{}])[-1].get("cpu_bytes")
        at_commits = "states are written at commits only" if summary["commit_every"] else "no states are written"
        has_way_out = full is not None and summary["written_bytes"]
        way_out = f"; with --cpu-memory {option_bytes(full)} {at_commits}" if has_way_out else ""
        endurance = summary["endurance_bytes"]
        warranted = f"A drive warranted for {TYPICAL_TBW / 1e12:.0f} TB written lasts"
        if endurance is not None:
            warranted = f"Its drives, warranted for {endurance / 1e12:,.0f} TB written together, last"
        yield f"{warranted} {life_in_words(summary['drive_life_steps'])}{way_out}."


def _predicted_lines(summary: dict[str, Any]) -> Iterator[str]:
    """What a simulated step takes, or why that is not predicted."""
    found = summary["predicted"]
    if found is None:
        yield f"Not predicted: {summary['not_predicted']}."
        return
    every = summary["commit_every"]
    commits = f", with {_seconds(found['commit_s'])} of each commit" if every and found["commit_s"] else ""
    yield (
        f"Predicted by simulation: {_seconds(found['seconds'])} a step{commits}, {_rate(found['tokens_per_s'])} "
        f"tokens/s; most of it is {found['waits_for']}. It reads {format_bytes(round(found['read_bytes']))} and writes "
        f"{format_bytes(round(found['written_bytes']))}, commits included."
    )
    if found["not_counted"]:
        yield f"Not counted: {', '.join(found['not_counted'])}."
    if found.get("hiding_tokens") is not None:
        yield f"From {found['hiding_tokens']:,} tokens a micro-batch on, nothing waits for anything but compute."


def _parts_table(found: dict[str, Any]) -> Table:
    """A stacked bar of a step, a row for each part."""
    from offload.cli.plan_time import bar

    table = Table("of a step", "seconds", "", title="What a step takes its time from, predicted", title_justify="left")
    for name, seconds, blocks in bar(found["parts_s"]):
        table.add_row(name, _seconds(seconds), blocks)
    return table


def _way_out(summary: dict[str, Any], options: PlanOptions) -> str:
    if not summary["fits_disk"]:
        return f"Its drives have {format_bytes(summary['disk_capacity_bytes'])}: have larger ones, or more of them."
    if summary["fits_device"] and options.gpu:
        return "Give less --cpu-memory, or have more RAM."
    if options.activation_tier is None and summary["activation_bytes"]:
        kept = format_bytes(summary["activation_bytes"])
        return f"Activations take {kept} of it: --activation-tier cpu or nvme keeps one block's on the device."
    return "Give a smaller --batch or --seq, or less --device-memory."


def _step_line(summary: dict[str, Any]) -> str:
    waits = {"disk": "the disk", "compute": "compute", "update": "the optimizer's kernels"}[summary["waits_for"]]
    rates = (
        f"{summary['flops']:.3g} FLOP/s, {WORDS[summary['flops_from']]}, and {summary['disk_gb_per_s']:.3g} GB/s, "
        f"{WORDS[summary['disk_from']]}"
    )
    if summary["kernel_seconds"]:
        known = WORDS[summary["kernels_from"]]
        rates += f", and {_seconds(summary['kernel_seconds'])} of the optimizer's kernels, {known}"
    hidden = summary["hiding_tokens"]
    hides = f"; from {hidden:,} tokens a micro-batch on, the disk costs nothing" if hidden else ""
    return (
        f"A step of {summary['tokens_per_step']:,} tokens takes about {_seconds(summary['step_seconds'])}, "
        f"{_rate(summary['tokens_per_s'])} tokens/s; it waits for {waits}{hides}. Computed from {rates}."
    )


def _trials_line(summary: dict[str, Any]) -> str:
    """What it gains to step states in backward."""
    times = f"{summary['speculate_gain']:.2f} times as fast as a step after it"
    if summary["speculate"]:
        return f"States are stepped in backward, by the formula {times}."
    auto = "would have" if summary["speculate_pays"] else "would not have"
    return (
        f"Stepped in backward, with Tuning(speculate=True) and a third slot a chunk, it is {times}, by the same rates; "
        f'"auto" {auto} it.'
    )


def _update_line(summary: dict[str, Any]) -> str:
    moved, rate, seconds = (summary[f"update_{name}"] for name in ("link_bytes", "flops_per_s", "seconds"))
    who = f"{summary['optimizer']} steps matrices"
    where = summary["update_link"]
    if not moved and seconds is None:
        return f"{who} on the CPU: {summary['update_flops']:.3g} FLOP; --flops gives the time."
    if not moved:
        known = "measured here" if summary["update_measured"] else WORDS[summary["flops_from"]]
        return f"{who} on the CPU, in about {_seconds(seconds)} of a step ({rate:.3g} FLOP/s, {known})."
    link = f"{format_bytes(moved)} over the link ({where['up_gb_per_s']:.3g} GB/s to the GPU, {WORDS[where['from']]})"
    if seconds is None:
        return f"{who} on the GPU: {summary['update_flops']:.3g} FLOP, and {link}; --flops gives the time."
    given = f"{rate:.3g} FLOP/s, {WORDS[summary['flops_from']]}"
    return f"{who} on the GPU, in about {_seconds(seconds)} of a step ({given}), with {link}."


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _spared_lines(summary: dict[str, Any]) -> Iterator[str]:
    """What a micro-batch would take on the device in ways that spare some of it."""
    ways = {
        "computed_bytes_in_chunks": "with offload.linear_cross_entropy in place of logits",
        "computed_bytes_in_tiles": f"with offload.tile_tokens(block.mlp, {TILE})",
        "computed_bytes_in_both": "with both",
    }
    whole = summary["computed_bytes"]
    spared = {name: summary[name] for name in ways if summary[name] is not None and summary[name] < whole}
    if spared:
        words = ", ".join(f"{format_bytes(nbytes)} {ways[name]}" for name, nbytes in spared.items())
        yield f"A micro-batch takes {format_bytes(whole)} of the device: {words}."


def _placement_table(summary: dict[str, Any]) -> Table:
    title = f"{summary['parameters']:,} trained parameters, optimizer states {TIERS[summary['tier']].where}"
    table = Table(title=title, title_justify="left")
    names = {DEVICE: "device (the CPU)" if summary["device"] == "cpu" else "device", CPU: CPU.words, NVME: NVME.words}
    kinds = KINDS if summary["commit_every"] is None else KINDS | {"slots": COMMITTED_SLOTS}
    of_optimizer = f"states of {summary['optimizer']}"
    table.add_column("tier")
    table.add_column("bytes", justify="right")
    table.add_column("what")
    beside = (
        ("activation_bytes", "activations: of a micro-batch, computed"),
        ("output_bytes", "logits: with their loss and gradients, computed"),
        ("backward_bytes", "gradients of activations, beyond the room of logits"),
        ("leaving_bytes", "grad: on the way to RAM, of a unit and of those before it"),
        ("context_bytes", "CUDA and its libraries, assumed"),
        ("communication_bytes", "NCCL, assumed"),
    )
    for tier, total in ((DEVICE, "device_total_bytes"), (CPU, "peak_cpu_bytes"), (NVME, "disk_bytes")):
        rows = [
            (row["nbytes"], f"{row['kind']}: {kinds.get(row['kind'], of_optimizer)}")
            for row in summary["rows"]
            if row["tier"] == tier.name
        ]
        if tier == DEVICE:
            rows += [(summary[key], words) for key, words in beside if summary[key]]
        for nbytes, words in rows:
            table.add_row(names[tier], format_bytes(nbytes), words)
        if rows:
            table.add_row(names[tier], format_bytes(summary[total]), "together", style="bold")
            table.add_section()
    return table


def _rank_table(summary: dict[str, Any]) -> Table:
    """What one of several ranks holds and sends."""
    sent = summary["sent_elements"]
    caption = (
        f"sent in a step: {sent['gradients']:,} elements of gradients, {sent['parameters']:,} of parameters, "
        f"{sum(sent.values()) / summary['parameters']:.2f} a parameter"
    )
    title = f"One of {summary['ranks']} ranks at stage {summary['stage']}"
    table = Table("held of", "bytes", "a parameter of the model", title=title, caption=caption)
    for kind, size in summary["held_bytes"].items():
        table.add_row(kind, format_bytes(size), f"{size / summary['parameters']:.3f}")
    return table


def _zero_r_table(summary: dict[str, Any], blocks: int) -> Table:
    """What ZeRO-R does to activations on one of several tensor-parallel ranks."""
    ranks, found = summary["tensor_parallel"], summary["zero_r"]
    title = f"ZeRO-R on one of {ranks} tensor-parallel ranks: the matrices of blocks are cut, all else counts as whole"
    caption = f"sent in a backward by --partition-activations: {found['gathered_elements']:,} elements of activations"
    table = Table("ZeRO-R", "bytes", "what", title=title, title_justify="left", caption=caption)
    for name, key, what in (
        ("", "checkpoint_bytes", f"what enters {blocks} blocks, all of it on each rank"),
        ("P_a", "part_bytes", f"1/{ranks} of it on each rank, with --partition-activations, in the activation tier"),
        ("P_a+cpu, P_a+nvme", "device_bytes", "on the device with the parts elsewhere: two gathered inputs"),
        ("C_B", "buffer_bytes", "buffers of gradients on their way, constant in the model's size"),
        ("M_D", "region_bytes", "reserved for activations in one piece"),
    ):
        table.add_row(name, format_bytes(found[key]), what)
    return table


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    limit, built = summary["device_budget_bytes"], summary["build_bytes"]
    building = f"The model takes {format_bytes(built)} more while it is built in fp32."
    if not built:
        building = "The model is built in parts, on the way to its tiers."
    allowed = "" if limit is None else f" of {format_bytes(limit)} allowed"
    yield (
        f"Peak of parameters on the device: {format_bytes(summary['device_bytes'])}{allowed}, with parameters "
        f"{TIERS[summary['param_tier']].where} and gradients {TIERS[summary['grad_tier']].where}."
    )
    yield (
        f"Peak RAM: {format_bytes(summary['peak_cpu_bytes'])} of {format_bytes(summary['cpu_budget_bytes'])} allowed; "
        f"the least that works is {format_bytes(summary['least_cpu_bytes'])}. {building}"
    )
    kept, chunks, there = summary["kept_chunks"], summary["chunks"], summary["device_chunks"]
    if 0 < there < chunks:
        yield f"States of {there} of {chunks} chunks stay on the device, with their gradients."
    if summary["staying_units"]:
        yield f"{summary['staying_units']} of the streamed units stay on the device."
    if summary["link_up_bytes"] is not None:
        yield (
            f"A step moves {format_bytes(summary['link_up_bytes'])} over the link to the device, and "
            f"{format_bytes(summary['link_down_bytes'])} to RAM."
        )
    if "experts" in summary:
        yield _experts_line(summary["experts"])
    if not summary["written_bytes"]:
        if 0 < there < chunks:
            return
        where = DEVICE.where if there else CPU.where
        read = summary["read_bytes"]
        what = f"{format_bytes(read)} of frozen parameters are read" if read else "nothing is read or written"
        yield f"All {chunks} chunks stay {where}: {what} in a step."
        return
    yield (
        f"{chunks - kept} of {chunks} chunks stream through {summary['buffers']} buffers. "
        f"Chunks fill {summary['arena_utilisation']:.0%} of the bytes reserved for them in RAM."
    )
    yield (
        f"A step reads {format_bytes(summary['read_bytes'])} and writes {format_bytes(summary['written_bytes'])}, "
        f"{summary['bytes_per_param']:.2f} bytes a parameter."
    )


def _experts_line(experts: dict[str, Any]) -> str:
    """What the experts of a mixture move in a step."""
    needed = (
        f"Each token needs {experts['per_token']} of a layer's {experts['experts']} experts, those of a micro-batch "
        f"about {experts['expected']:.3g} if routing is uniform"
    )
    states = ""
    if experts["states"]:
        figures = " of ".join(format_bytes(experts[name]) for name in ("states_expected", "states"))
        states = f" Of their states a step reads and writes {figures}."
    if not experts["nbytes"]:
        return f"{needed}; all experts are on the device.{states}"
    how = f"in tiles of {experts['together']}" if experts["together"] else "with whole layers"
    moved = [
        f"{format_bytes(experts[f'{what}_expected'])} of {format_bytes(experts[what])} {where}"
        for what, where in (("link", "over the link"), ("disk", "from the disk"))
        if experts[what]
    ]
    moves = f"{' and '.join(moved) or 'nothing is moved for that'} in a step"
    return f"{needed}. Experts come {how}: {moves}.{states}"


def _activation_line(summary: dict[str, Any], options: PlanOptions, model: Sized) -> str:
    entering, saved = format_bytes(summary["entering_bytes"]), summary["saved_bytes"]
    how = "with fused attention" if options.gpu else "as the CPU computes attention"
    known = f"; all that they save without being recomputed, {format_bytes(saved or 0)} ({how})."
    if saved is None:
        why = printable(summary["not_measured"])
        known = f", by the formula for transformers: this model's forward does not run on the meta device ({why})."
    return (
        f"What enters {model.blocks} blocks in a micro-batch of {options.batch} x {options.seq} takes {entering}{known}"
    )


def _budget_table(summary: dict[str, Any]) -> Table:
    """A column for each budget."""
    budgets = summary["budgets"]
    has_time = any(one["step_seconds"] for one in budgets)
    table = Table(title="What --cpu-memory would do (--tier nvme)", title_justify="left", show_header=True)
    table.add_column("--cpu-memory")
    for one in budgets:
        table.add_column(format_bytes(one["cpu_bytes"]), justify="right")
    lives = (life_in_words(one["drive_life_steps"]) for one in budgets)
    table.add_row("states in RAM", *(f"{one['share']:.0%}" for one in budgets))
    table.add_row("moved by the disk", *(format_bytes(one["moved_bytes"]) for one in budgets))
    if has_time:
        table.add_row("step, computed", *(_seconds(one["step_seconds"]) for one in budgets))
    endurance = summary["endurance_bytes"]
    whose = f"of a {TYPICAL_TBW / 1e12:.0f} TB drive" if endurance is None else "that its drives last"
    table.add_row(f"steps {whose}", *(life.removesuffix(" steps") for life in lives))
    table.add_row("fits", *("yes" if one["fits"] else "no" for one in budgets))
    return table
