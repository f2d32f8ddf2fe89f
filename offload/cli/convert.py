"""`offload convert`: a DeepSpeed configuration as a call of this library, and what in it has no counterpart.

Options and defaults are those of DeepSpeed's page "DeepSpeed Configuration JSON" (0.19). A value "auto" is filled in by
the framework that reads the file, so it says nothing here.
"""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.cli.console import plain_console, print_json, show_table
from offload.cli.options import Json
from offload.errors import ConfigError
from offload.io.regular import read_json
from offload.sizes import MIB

ORDER = ("tier", "path", "param_tier", "activation_tier", "compute_dtype", "accumulation", "stage")
"""Of the options in the call."""
ALWAYS = "nothing to set: always so"
YOURS = "stays in your script"
DEVICES = {"none": "device", None: "device", "cpu": "cpu", "nvme": "nvme"}
"""The tier of what a section offloads, by its `device`."""
TIER_ORDER = ('"device"', '"cpu"', '"nvme"')
"""The expressions of tiers, the fastest first."""
STATE_TIER = ("zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload")
"""Options that say where states are."""
COLUMNS = 80
"""Of the script, but for long strings."""
MOST_BYTES = 16 * MIB
"""Of a configuration."""


@dataclass(frozen=True)
class Row:
    """One option of the file.

    Attributes:
        option: its dotted name.
        value: its value in the file.
        becomes: what to use here instead, or why there is nothing.
        is_served: whether there is something to use.
    """

    option: str
    value: Any
    becomes: str
    is_served: bool = True


@dataclass
class Call:
    """The script that is printed, in parts. All strings are Python expressions.

    Attributes:
        imports: what the script imports beside torch and this library.
        optimizer: the optimizer that is made; None: none is.
        options: the options of OffloadZero, by name.
        tuning: the options of Tuning, by name.
        scaler: the GradScaler; None: there is none.
        micro_batches: how many backward passes a step has.
        clip: the largest norm of the gradients; None or 0: they are not clipped.
    """

    imports: list[str] = field(default_factory=list)
    optimizer: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    tuning: dict[str, str] = field(default_factory=dict)
    scaler: str | None = None
    micro_batches: int = 1
    clip: float | None = None

    def text(self) -> str:
        """The script, around `model` and `loader`."""
        return "\n".join([*self._construction(), *self._loop()]) + "\n"

    def _construction(self) -> Iterator[str]:
        names = "OffloadZero, Tuning" if self.tuning else "OffloadZero"
        yield from ("import torch", *self.imports, f"from offload import {names}", "")
        given = "model"
        if self.optimizer:
            yield f"optimizer = {self.optimizer}"
            given = "model, optimizer"
        options = {name: self.options[name] for name in ORDER if name in self.options}
        if self.tuning:
            options["tuning"] = f"Tuning({_arguments(self.tuning)})"
        yield "optimizer = OffloadZero("
        yield f"    {given},"
        yield from (f"    {name}={value}," for name, value in options.items())
        yield ")"
        if self.scaler:
            yield f"scaler = {self.scaler}"
            yield "optimizer.attach(scaler=scaler)"

    def _loop(self) -> Iterator[str]:
        yield "for number, batch in enumerate(loader, 1):"
        share = f" / {self.micro_batches}" if self.micro_batches > 1 else ""
        yield f"    loss = model(**batch).loss{share}"
        yield "    scaler.scale(loss).backward()" if self.scaler else "    loss.backward()"
        indent = "    "
        if self.micro_batches > 1:
            yield f"    if number % {self.micro_batches} == 0:"
            indent *= 2
        if self.clip:
            if self.scaler:
                yield f"{indent}scaler.unscale_(optimizer)"
            yield f"{indent}optimizer.clip_grad_norm_({self.clip!r})"
        if self.scaler:
            yield f"{indent}scaler.step(optimizer)"
            yield f"{indent}scaler.update()"
        else:
            yield f"{indent}optimizer.step()"
        yield f"{indent}optimizer.zero_grad()"


def _arguments(options: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


Rule = Callable[[Call, Any], str]
"""Changes the call, and returns what the option becomes."""


def _is_on(value: Any) -> bool:
    """A switch, as DeepSpeed reads it: true and false may be words, too.

    Raises:
        ValueError: it is neither.
    """
    switches = {"true": True, "false": False}
    if not isinstance(value, bool) and str(value).lower() not in switches:
        raise ValueError
    return switches[str(value).lower()]


def _whole(value: Any, least: int, most: float = math.inf) -> int:
    """A whole number; 5e8 is one.

    Raises:
        ValueError: it is none, or not from `least` to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError
    if not least <= value <= most:
        raise ValueError
    return int(value)


def _at_least_0(value: Any) -> float:
    """A number.

    Raises:
        ValueError: it is none, or negative.
    """
    if isinstance(value, bool) or not float(value) >= 0:
        raise ValueError
    return float(value)


def _bucket(call: Call, value: Any) -> str:
    call.tuning["bucket"] = str(2 * _whole(value, 1))  # of 16-bit elements
    return f"Tuning(bucket={call.tuning['bucket']}), in bytes"


def _stage(call: Call, value: Any) -> str:
    value = _whole(value, 0, 3)
    if not value:
        return "nothing to set; with several ranks each still keeps its share of the states only"
    call.options["stage"] = str(value)
    return f"stage={value}, with several ranks"


def _states(call: Call, value: Any) -> str:
    tier = DEVICES[value]
    call.options["tier"] = f'"{tier}"'
    return f'tier="{tier}"'


def _params(call: Call, value: Any) -> str:
    tier = DEVICES[value]
    if tier != "device":
        call.options["param_tier"] = f'"{tier}"'
        return f'param_tier="{tier}"'
    return "nothing to set: parameters stay where they fit"


def _path(call: Call, value: Any) -> str:
    own = str(Path(value) / "offload")
    known = call.options.get("path")
    if known is None:
        call.options["path"] = json_module.dumps(own)
    elif known != json_module.dumps(own):
        return f"no second path: states and parameters share {known}; a list of directories stripes over both"
    return (
        f"path={call.options['path']}: a directory of this run's own, whose parent exists; it is the checkpoint as well"
    )


def _accumulation(call: Call, value: Any) -> str:
    call.micro_batches = _whole(value, 1)
    if call.micro_batches == 1:
        return "nothing to set"
    call.options["accumulation"] = str(call.micro_batches)
    return f"accumulation={call.micro_batches}; divide the loss by it yourself, which DeepSpeed's engine does"


def _clip(call: Call, value: Any) -> str:
    call.clip = _at_least_0(value)
    return f"optimizer.clip_grad_norm_({call.clip!r})" if call.clip else "nothing to set"


def _compute(call: Call, dtype: str) -> None:
    """Makes a dtype that of the computation.

    Raises:
        ConfigError: the file has said another one.
    """
    if call.options.setdefault("compute_dtype", dtype) != dtype:
        raise ConfigError("fp16 and bf16 are both enabled, which DeepSpeed refuses, too: enable one of them")


def _bf16(call: Call, value: Any) -> str:
    if _is_on(value):
        _compute(call, "torch.bfloat16")
        return "compute_dtype=torch.bfloat16"
    return "nothing to set"


def _fp16(call: Call, value: Any) -> str:
    if not _is_on(value):
        return "nothing to set"
    _compute(call, "torch.float16")
    call.scaler = "GradScaler"
    return "compute_dtype=torch.float16 and torch's GradScaler"


def _activations(call: Call, value: Any) -> str:
    if not _is_on(value):
        return "nothing to set"
    call.options["activation_tier"] = '"cpu"'
    return 'activation_tier="cpu": units are recomputed, and what enters them waits in RAM'


def _optimizer(call: Call, config: dict[str, Any]) -> str:
    """Makes the call use the optimizer of the file.

    Args:
        call: the call, which is changed.
        config: the section "optimizer".

    Returns:
        What the section becomes.

    Raises:
        ConfigError: it is none that runs here, or it does not take its parameters.
    """
    kind, params = str(config.get("type", "AdamW")), dict(config.get("params") or {})
    params = {name: value for name, value in params.items() if value != "auto"}
    if kind.lower() == "lion":
        # The rule is that of DeepSpeed's, whose learning rate is 1e-3 where nothing is said.
        _require_known(kind, params, {"lr", "betas", "weight_decay"})
        call.imports.append("from lion_pytorch import Lion")
        call.optimizer = _making("Lion", {"lr": 1e-3} | params)
        return "Lion of the package lion-pytorch"
    if kind.lower() not in ("adam", "adamw"):
        return _of_torch(call, kind, params)
    # DeepSpeed's "Adam" decays weights as AdamW does unless adam_w_mode says otherwise.
    is_decoupled = kind.lower() == "adamw" or params.get("adam_w_mode", True) is not False
    name = "AdamW" if is_decoupled else "Adam"
    taken = ("lr", "betas", "eps", "weight_decay")
    _require_known(kind, params, {*taken, *SAME_ADAM})
    for option, (usual, what) in OTHER_ADAM.items():
        if params.get(option, usual) is not usual:
            raise ConfigError(f"optimizer.params.{option} is {params[option]!r}: {what} is not converted: leave it out")
    options = {one: params[one] for one in taken if one in params}
    # torch's AdamW decays by 0.01 where nothing is said, DeepSpeed's by 0.
    options.setdefault("weight_decay", 0.0)
    _require_taken(kind, name, options)
    call.optimizer = _making(f"torch.optim.{name}", options)
    return f"torch.optim.{name}" + ("; DeepSpeed's Adam decays as AdamW does" if name.lower() != kind.lower() else "")


def _of_torch(call: Call, kind: str, params: dict[str, Any]) -> str:
    """Makes the call use another optimizer of torch's, as DeepSpeed does."""
    from torch import optim

    known = {name.lower(): name for name, one in vars(optim).items() if isinstance(one, type)}
    name = known.get(kind.lower(), "Optimizer")
    if name == "Optimizer":
        raise ConfigError(
            f"optimizer.type is {kind!r}: Adam, AdamW, Lion and torch's own optimizers are converted: choose one of "
            "them, or give OffloadZero the torch optimizer in a script of your own"
        )
    _require_taken(kind, name, params)
    call.optimizer = _making(f"torch.optim.{name}", params)
    return f"torch.optim.{name}"


def _require_taken(kind: str, name: str, params: dict[str, Any]) -> None:
    """Requires that a class of torch.optim takes its parameters, and that its rule can be served.

    Args:
        kind: what the file calls it.
        name: of the class.
        params: its arguments.

    Raises:
        ConfigError: it does not take a value, or cannot be served.
        TypeError: it has no such argument, or one of another kind.
    """
    from torch import nn, optim, zeros

    from offload.optim.adopt import rules_of

    try:
        rules_of([getattr(optim, name)([nn.Parameter(zeros(2, 2)), nn.Parameter(zeros(2))], **params)])
    except (ConfigError, ValueError) as error:  # of this library, or of the class
        raise ConfigError(f"optimizer.type is {kind!r}: {error}") from error


def _require_known(kind: str, params: dict[str, Any], known: set[str]) -> None:
    """Requires that nothing is left out of an optimizer that changes the training.

    Raises:
        ConfigError: there is a parameter that is none of those that are known.
    """
    if unknown := params.keys() - known:
        raise ConfigError(
            f"optimizer.params has {', '.join(sorted(unknown))}, and what is converted of {kind} are "
            f"{', '.join(sorted(known))}: leave it out, or give OffloadZero the torch optimizer in a script of your own"
        )


def _making(name: str, params: dict[str, Any]) -> str:
    """The expression that makes an optimizer."""
    return _calling("optimizer", name, ["model.parameters()", *(f"{one}={value!r}" for one, value in params.items())])


def _calling(target: str, name: str, arguments: Sequence[str]) -> str:
    """A call, in a line, or with a line for each argument where that is too long.

    Args:
        target: the variable that gets the result.
        name: of what is called.
        arguments: its arguments.
    """
    line = f"{name}({', '.join(arguments)})"
    if len(f"{target} = {line}") <= COLUMNS:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in arguments), ")"])


def _says(text: str) -> Rule:
    return lambda call, value: text


SERVED: dict[str, Rule] = {
    "train_batch_size": _says(f"{YOURS}: the data loader's"),
    "train_micro_batch_size_per_gpu": _says(f"{YOURS}: the data loader's"),
    "gradient_accumulation_steps": _accumulation,
    "gradient_clipping": _clip,
    "bf16.enabled": _bf16,
    "bfloat16.enabled": _bf16,
    "fp16.enabled": _fp16,
    "zero_optimization.stage": _stage,
    "zero_optimization.offload_optimizer.device": _states,
    "zero_optimization.offload_optimizer.nvme_path": _path,
    "zero_optimization.offload_param.device": _params,
    "zero_optimization.offload_param.nvme_path": _path,
    "zero_optimization.cpu_offload": lambda call, value: _states(call, "cpu" if _is_on(value) else "none"),
    "zero_optimization.cpu_offload_params": lambda call, value: _params(call, "cpu" if _is_on(value) else "none"),
    "zero_optimization.reduce_bucket_size": _bucket,
    "zero_optimization.allgather_bucket_size": _says("nothing to set: small ones share Tuning(bucket=...)"),
    "zero_optimization.sub_group_size": _says("nothing to set: Tuning(chunk=...) has this role, 64 MiB by default"),
    "zero_optimization.stage3_max_live_parameters": _says("device_memory=..., in bytes; half of what is free if left"),
    "zero_optimization.stage3_max_reuse_distance": _says("nothing to set: the order of a step is known"),
    "zero_optimization.stage3_prefetch_bucket_size": _says("nothing to set: Tuning(prefetch_units=...), 1 by default"),
    "zero_optimization.stage3_param_persistence_threshold": _says(
        "nothing to set: parameters outside of the blocks stay on the device"
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _says(
        "nothing to set: model.state_dict() is whole, and optimizer.export(directory) writes safetensors"
    ),
    "zero_optimization.zero_hpz_partition_size": _says(
        "process_group=init_device_mesh(device, (groups, ranks_of_a_group)): replicas by shards"
    ),
    "zero_optimization.offload_optimizer.buffer_count": _says(
        "nothing to set: cpu_memory=... says how much RAM to use"
    ),
    "zero_optimization.offload_param.buffer_count": _says("nothing to set: cpu_memory=... says how much RAM to use"),
    "zero_optimization.offload_param.buffer_size": _says("nothing to set: cpu_memory=... says how much RAM to use"),
    "zero_optimization.offload_param.max_in_cpu": _says("nothing to set: cpu_memory=... says how much RAM to use"),
    "zero_optimization.offload_optimizer.fast_init": _says(ALWAYS),
    "zero_optimization.load_from_fp32_weights": _says(ALWAYS),
    "zero_optimization.round_robin_gradients": _says(ALWAYS),
    "zero_optimization.ignore_unused_parameters": _says(ALWAYS),
    "data_types.grad_accum_dtype": _says("nothing to set: with accumulation > 1 gradients are summed in fp32"),
    "communication_data_type": _says("nothing to set: gradients travel in their own dtype, and are summed in fp32"),
    "seq_parallel_communication_data_type": _says(YOURS),
    "prescale_gradients": _says("nothing to set: gradients are summed in fp32 before they are divided"),
    "gradient_predivide_factor": _says("nothing to set: gradients are summed in fp32 before they are divided"),
    "zero_allow_untested_optimizer": _says("nothing to set"),
    "zero_force_ds_cpu_optimizer": _says("nothing to set"),
    "steps_per_print": _says("optimizer.stats(), when you want it"),
    "wall_clock_breakdown": _says('with optimizer.timeline("t.json"): ...'),
    "memory_breakdown": _says("optimizer.stats(): peak_cpu_bytes, peak_device_bytes"),
    "dump_state": _says("nothing to set: the first line printed says what was chosen"),
    "checkpoint": _says("resume=True, on any number of ranks: the swap directory is the checkpoint"),
    "scheduler": _says(
        "one of torch.optim.lr_scheduler over the new optimizer, kept by optimizer.attach(scheduler=...)"
    ),
    "activation_checkpointing.cpu_checkpointing": _activations,
    "activation_checkpointing.contiguous_memory_optimization": _says(
        'nothing to set: activation_tier="device" reserves one region'
    ),
    "activation_checkpointing.partition_activations": _says(
        "partition_activations=True, where torch's parallelize_module has sharded the model"
    ),
    "activation_checkpointing.number_checkpoints": _says("nothing to set: each unit is recomputed"),
    "activation_checkpointing.synchronize_checkpoint_boundary": _says("nothing to set"),
    "activation_checkpointing.profile": _says('with optimizer.timeline("t.json"): ...'),
    "aio": _says("nothing to set: `offload bench io DIRECTORY` measures what is best, and it is remembered"),
}
"""By option, or by the name of a section all of which becomes the same."""
ALSO_ALWAYS = ("pin_memory", "pipeline", "pipeline_read", "pipeline_write", "overlap_comm", "contiguous_gradients")
"""The last part of options that say to do what is done anyway."""
SAME_ADAM = frozenset(
    {"torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fp32_optimizer_states", "set_grad_none", "fused"}
)
"""What DeepSpeed's Adam takes beside torch's options; but for `OTHER_ADAM` they change no bit of the training."""
OTHER_ADAM = {"bias_correction": (True, "Adam without bias correction"), "amsgrad": (False, "AMSGrad")}
"""What is usual of these, and what the training is otherwise."""
LOSS_SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast")
WITHOUT: dict[str, str] = {
    "zero_optimization.offload_optimizer.ratio": "none: cpu_memory=... says which share of the states stays in RAM",
    "zero_optimization.zero_quantized_weights": "none: parameters travel as they are",
    "zero_optimization.zero_quantized_gradients": "none: gradients travel as they are",
    "fp16.hysteresis": "none: torch's GradScaler halves the scale at the first overflow",
    "fp16.min_loss_scale": "none: a scale that has fallen to nothing is a ConfigError",
}
"""Where more is to be said than that there is no counterpart."""


def convert(
    file: Annotated[Path, typer.Argument(help="DeepSpeed's configuration, such as ds_config.json.")],
    json: Json = False,
) -> None:
    """Show a DeepSpeed configuration as a call of this library, and what in it has no counterpart."""
    call, rows = converted(_read(file))
    if json:
        found = [{"option": row.option, "value": row.value, "becomes": row.becomes} for row in rows if row.is_served]
        left = [{"option": row.option, "value": row.value, "why": row.becomes} for row in rows if not row.is_served]
        print_json({"script": call.text(), "options": found, "without_counterpart": left})
        return
    _show(call, rows)


def converted(config: dict[str, Any]) -> tuple[Call, list[Row]]:
    """Converts a DeepSpeed configuration.

    Args:
        config: the configuration.

    Returns:
        The call, and each option of `config` in the order of the file.

    Raises:
        ConfigError: a value is of another kind than its option takes, the optimizer is none that runs here, or a
            section offloads to nvme and names no path.
    """
    call = Call()
    options = list(_options(config))
    rows = []
    for option, value in options:
        with _understanding(option, value):
            rows.append(_row(call, option, value))
    if call.scaler:
        with _understanding("fp16", config["fp16"]):
            call.scaler = _scaler({name: value for name, value in config["fp16"].items() if value != "auto"})
    batch, micro_batch = (config.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    if "gradient_accumulation_steps" not in config and isinstance(batch, int) and isinstance(micro_batch, int):
        rows = [
            _with_accumulation(one, batch, micro_batch) if one.option == "train_batch_size" else one for one in rows
        ]
    rows = _with_states_below(call, rows)
    call.options.setdefault("compute_dtype", "torch.float32")
    if '"nvme"' in call.options.values() and "path" not in call.options:
        raise ConfigError("a section offloads to nvme and names no nvme_path: add one, the directory for swap files")
    return call, rows


def _with_states_below(call: Call, rows: list[Row]) -> list[Row]:
    """Puts states on no faster tier than parameters, which bring them along, and says so in the row of their tier."""
    params, states = call.options.get("param_tier", '"device"'), call.options.get("tier", '"device"')
    tier = max(params, states, key=TIER_ORDER.index)
    call.options["tier"] = tier
    if tier == states:
        return rows
    said = f"tier={tier}: trained parameters are on no slower tier than their states"
    return [replace(one, becomes=said) if one.option in STATE_TIER else one for one in rows]


def _with_accumulation(row: Row, batch: int, micro_batch: int) -> Row:
    """The row of a batch, where DeepSpeed accumulates what makes micro-batches a batch."""
    if batch <= micro_batch:
        return row
    ranks = f"{batch} / ({micro_batch} x ranks)"
    said = f"{row.becomes}; DeepSpeed accumulates {ranks} micro-batches for it: say accumulation=..., and step as often"
    return replace(row, becomes=said)


@contextmanager
def _understanding(option: str, value: Any) -> Iterator[None]:
    """A context for what reads the value of an option.

    Raises:
        ConfigError: the body raised because the value is of another kind than the option takes.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{option} is {value!r:.100}, which DeepSpeed does not take there: correct it") from error


def _options(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each option by its dotted name, with its value. A section that has one counterpart as a whole is one option."""
    for name, value in section.items():
        option = prefix + name
        if isinstance(value, dict) and option not in SERVED and option != "optimizer":
            yield from _options(value, f"{option}.")
        else:
            yield option, value


def _row(call: Call, option: str, value: Any) -> Row:
    name = option.rpartition(".")[2]
    if value == "auto":
        return Row(option, value, "what the framework fills in: say it in the call")
    if option == "optimizer":
        return Row(option, value, _optimizer(call, value))
    if option in SERVED:
        return Row(option, value, SERVED[option](call, value))
    if name in ALSO_ALWAYS:
        return Row(option, value, ALWAYS)
    if option in WITHOUT:
        return Row(option, value, WITHOUT[option], is_served=False)
    if option.startswith("fp16.") and name in LOSS_SCALE:
        return Row(option, value, "the GradScaler's arguments")
    return Row(option, value, "none", is_served=False)


def _scaler(fp16: dict[str, Any]) -> str:
    """A call of torch's GradScaler that does what the section fp16 says.

    Args:
        fp16: the section. Options that are not in it have DeepSpeed's defaults.
    """
    scale, window = f"2.0**{int(fp16.get('initial_scale_power', 16))}", str(int(fp16.get("loss_scale_window", 1000)))
    if static := _at_least_0(fp16.get("loss_scale", 0)):
        scale, window = repr(static), "2**31 - 1"  # never grows
    device = "next(model.parameters()).device.type"
    return _calling("scaler", "torch.amp.GradScaler", [device, f"init_scale={scale}", f"growth_interval={window}"])


def _read(file: Path) -> dict[str, Any]:
    """Reads the configuration in a JSON file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not JSON.
    """
    try:
        return read_json(file, MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON of DeepSpeed's: {error}") from error


def _show(call: Call, rows: list[Row]) -> None:
    from rich.syntax import Syntax
    from rich.table import Column, Table

    console = plain_console()
    # Its lines are not wrapped, or cut off at the terminal's edge: people copy them.
    script = Syntax("", "python", background_color="default").highlight(call.text()) if console.is_terminal else None
    console.print(call.text() if script is None else script, soft_wrap=True)
    for title, served in (("What each option becomes", True), ("Without a counterpart", False)):
        columns = [Column(heading, overflow="fold") for heading in ("option", "value", "here")]
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            if row.is_served is served:
                table.add_row(row.option, json_module.dumps(row.value), row.becomes)
        if table.row_count:
            show_table(console, table)
