"""The models that `offload plan` plans for, on the meta device.

That is a preset, a transformers configuration, or what a function of the user's returns.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload import torch_private
from offload.cli.options import PlanOptions
from offload.demo.gpt import GPT, PRESETS
from offload.errors import ConfigError
from offload.model.units import ROOT, blocks_of
from offload.optim.adopt import rules_of
from offload.optim.rule import Rule
from offload.optim.rules.adam import AdamRule
from offload.options import Tuning
from offload.planner.explain import Plans
from offload.planner.routing import Routing
from offload.sizes import MASTER_ITEM_BYTES, format_bytes, parse_bytes

MOST_CHUNKS = 1 << 20
"""Of a rank, that are planned."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "amsgrad": ("adamw", {"amsgrad": True}),
    "rmsprop-centered": ("rmsprop", {"centered": True}),
    "rmsprop-momentum": ("rmsprop", {"momentum": 0.9}),
    "sgd-momentum": ("sgd", {"momentum": 0.9}),
}
"""Names of classes with options that bring more states."""


@dataclass(frozen=True)
class Sized:
    """A model on the meta device.

    Attributes:
        module: the model.
        blocks: how many blocks it has.
        width: how many elements a token has between blocks.
        embeddings: the modules before the blocks.
        routing: of a mixture of experts; None: it is none.
        inputs: what its forward is given; None: tokens.
        experts: the names of parameters that have all experts of a layer.
        numel: the number of elements of all parameters.
    """

    module: nn.Module
    blocks: int
    width: int
    embeddings: Sequence[nn.Module]
    routing: Routing | None = None
    inputs: tuple[Any, ...] | None = None

    @cached_property
    def plans(self) -> Plans:
        """Makes its plans."""
        return Plans(self.module)

    @cached_property
    def trained_of_units(self) -> list[int]:
        """How many elements each unit has that are trained. The last one is the root unit."""
        counts: dict[str, int] = {name: 0 for name, _ in blocks_of(self.module)} | {ROOT: 0}
        for name, param in self.module.named_parameters():
            if param.requires_grad:
                counts[_innermost(name, counts)] += param.numel()
        return list(counts.values())

    @cached_property
    def experts(self) -> list[str]:
        if self.routing is None:
            return []
        params = self.module.named_parameters()
        return [name for name, one in params if one.dim() == 3 and len(one) == self.routing.experts]

    @cached_property
    def numel(self) -> int:
        quantised = {module for module in self.module.modules() if isinstance(module, _Quantised)}
        inside = {param for module in quantised for param in module.parameters(recurse=False)}
        plain = sum(param.numel() for param in self.module.parameters() if param not in inside)
        return plain + sum(module.in_features * module.out_features for module in quantised)


def sized(options: PlanOptions) -> Sized:
    """The model that these options name.

    Raises:
        ConfigError: there is no such preset, configuration or function, transformers is not installed, or more blocks
            are to be frozen than there are.
    """
    if options.model is not None:
        model = _made(options.model)
    else:
        model = _preset(options) if options.config is None else _configured(options.config, options.layers)
    _freeze(model, options.frozen)
    if options.lora_rank is not None:
        model.module.requires_grad_(False)
    if options.quantise is not None:
        _quantise(model, options.quantise)
    if options.lora_rank is not None:
        _adapt(model, options.lora_rank)
    _require_few_chunks(model, options)
    return model


def _require_few_chunks(model: Sized, options: PlanOptions) -> None:
    """Requires a model of which a rank has no more chunks than a plan can list.

    Raises:
        ConfigError: it has more.
    """
    chunk = parse_bytes(options.chunk or Tuning().chunk, "--chunk")
    count = MASTER_ITEM_BYTES * model.numel // (max(chunk, 1) * options.ranks * options.tensor_parallel)
    if chunk and count > MOST_CHUNKS:
        raise ConfigError(
            f"{model.numel:,} parameters are {count:,} chunks of {format_bytes(chunk)} on a rank, and plans are made "
            f"for {MOST_CHUNKS:,} at most: give a larger --chunk, more --ranks, or a smaller model"
        )


def _preset(options: PlanOptions) -> Sized:
    """The GPT of a preset, with the layers and the width that were given, and positions for the sequence.

    Raises:
        ConfigError: there is no such preset.
    """
    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: choose one of {', '.join(PRESETS)}")
    preset = PRESETS[options.preset]
    width = preset.width if options.width is None else options.width
    # How many heads share the width changes no size.
    heads = math.gcd(width, preset.heads)
    layers = preset.layers if options.layers is None else options.layers
    context = max(preset.context, options.seq)
    model = GPT(replace(preset, layers=layers, width=width, heads=heads, context=context), device="meta")
    return Sized(model, layers, width, [model.embed, model.positions])


def _configured(config: Path, layers: int | None = None) -> Sized:
    """The transformers model of a config.json.

    Args:
        config: the file, or its directory.
        layers: how many blocks it has; None: as many as the configuration says.

    Raises:
        ConfigError: transformers is not installed, or the file is not there, is no configuration that it knows, or one
            of which it makes no language model.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("--config needs transformers: pip install transformers") from error
    file = config / "config.json" if config.is_dir() else config
    if not file.is_file():  # transformers would look for it on a hub, several times
        raise ConfigError(f"--config {config}: there is no {file}; give a config.json, or the directory of one")
    try:
        found = transformers.AutoConfig.from_pretrained(config, trust_remote_code=False)  # which would ask
    except Exception as error:
        raise _refused(f"{config} is no configuration that transformers knows", error) from error
    try:
        if layers is not None:
            given = found.to_dict() | {"num_hidden_layers": layers}
            given.pop("layer_types", None)  # one a layer, which follow from their number
            found = type(found).from_dict(given)
        architectures = getattr(found, "architectures", None) or ()
        kind = next((getattr(transformers, name) for name in architectures if hasattr(transformers, name)), None)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(found) if kind is None else kind(found)
        text = found.get_text_config()
        width, embeddings = int(text.hidden_size), [model.get_input_embeddings()]
    except Exception as error:
        raise _refused(f"transformers makes no language model of {config}", error) from error
    return Sized(model, len(blocks_of(model)), width, embeddings, _routing_of(text))


def _made(name: str) -> Sized:
    """The model that a function returns.

    Args:
        name: of the function, as module:function.

    Raises:
        ConfigError: there is no such function, it fails, or returns something else.
    """
    module, _, function = name.partition(":")
    if not (module and function):
        raise ConfigError(f"--model {name}: give module:function, such as train:build for build() in train.py")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):  # what it prints is not of the plan, which a program may read
            make = getattr(import_module(module), function)
            made = _on_meta_device(make)
    except (Exception, SystemExit) as error:  # a script that reads its own command line exits
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"--model {name} does not make a model on the meta device ({said:.300}): give a function without arguments "
            "that can be imported from here, and does not load values"
        ) from error
    found, inputs = (made[0], tuple(made[1:])) if isinstance(made, tuple) and made else (made, None)
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"--model {name} made a {type(made).__name__}: it has to return a module, or a tuple with one"
        )
    embeddings = [one for one in found.modules() if isinstance(one, nn.Embedding)]
    layers = [one for one in found.modules() if isinstance(one, nn.Linear)]
    width = embeddings[0].embedding_dim if embeddings else layers[-1].in_features if layers else 1
    return Sized(found.to("meta"), len(blocks_of(found)), width, embeddings, inputs=_on_meta(inputs))


def _on_meta(inputs: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    made: tuple[Any, ...] | None = torch_private.tree_map_only(Tensor, lambda one: one.to("meta"), inputs)
    return made


def _on_meta_device(make: Callable[[], Any]) -> Any:
    """What a function makes where tensors have no values; if that fails, where `torch.linspace` has some.

    Models look at those while they are built: the rates of stochastic depth are one a block.
    """
    try:
        with torch.device("meta"):
            return make()
    except RuntimeError:
        with torch.device("meta"), _NumbersOnCPU():
            return make()


class _NumbersOnCPU(TorchFunctionMode):
    """A context in which `torch.linspace` makes its numbers on the CPU."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return func(*args, **({"device": "cpu"} | given if func is torch.linspace else given))


def _refused(what: str, error: Exception) -> ConfigError:
    """The error for a file that transformers does not take, which may be anything of Python's in it."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ConfigError(f"--config: {what} ({said:.300}); give the config.json of a language model, or its directory")


def _routing_of(config: Any) -> Routing | None:
    """How a transformers model routes tokens to experts; None: it has none."""
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts, per_token = next(filter(None, counts), None), getattr(config, "num_experts_per_tok", None)
    return Routing(experts, per_token) if experts and per_token else None


@cache
def rules_named(name: str, form: str = "fp32") -> tuple[Rule, Rule]:
    """The rules of an optimizer with the options that its name says, else torch's defaults.

    Args:
        name: one of `optimizers`.
        form: how its states are kept, if it can do it; see `rules_of`.

    Returns:
        That of the matrices of blocks, and that of all else: Adam's if the optimizer takes matrices only, as Muon does.

    Raises:
        ConfigError: there is no such optimizer, or it cannot be offloaded.
    """
    known = optimizers()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--optimizer {name}: {meant}Choose one of {', '.join(known)}")
    kind, options = known[name]
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    try:
        given = kind([vector, matrix], **options)
    except ValueError:
        (rule,) = rules_of([kind([matrix], **options)], form)
        return rule, AdamRule(form)
    (rule,) = rules_of([given], form)
    return rule, rule


def optimizers() -> dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]]:
    """Class and options of the optimizers that --optimizer names: torch's classes, in lower case, and VARIANTS."""
    classes = {name.lower(): one for name, one in vars(torch.optim).items() if _is_optimizer(one)}
    names: dict[str, tuple[Any, dict[str, Any]]] = {name: (kind, {}) for name, kind in classes.items()}
    variants = {name: (classes[of], options) for name, (of, options) in VARIANTS.items()}
    return dict(sorted((names | variants).items()))


def _is_optimizer(one: object) -> bool:
    is_class = isinstance(one, type) and issubclass(one, torch.optim.Optimizer)
    return is_class and one is not torch.optim.Optimizer


def _innermost(name: str, units: Container[str]) -> str:
    """The innermost of some units that a module or parameter is or lies in, by their names; ROOT if it is none."""
    while name not in units and name != ROOT:
        name = name.rpartition(".")[0]
    return name


def _freeze(model: Sized, frozen: int) -> None:
    """Freezes the first blocks, and the embeddings before them.

    Args:
        model: the model.
        frozen: how many blocks; with 0 the embeddings are trained, too.

    Raises:
        ConfigError: the model has fewer blocks.
    """
    blocks = [module for _, module in blocks_of(model.module)]
    if not 0 <= frozen <= len(blocks):
        raise ConfigError(f"--frozen {frozen}: give a whole number, from 0 to the model's {len(blocks)} blocks")
    for module in [*model.embeddings, *blocks[:frozen]] if frozen else ():
        module.requires_grad_(False)


class _Adapted(nn.Module):
    """A linear layer with a trained product of low rank beside it, as LoRA has (Hu et al., arXiv 2106.09685).

    Args:
        layer: the layer.
        rank: the rank of the product.
    """

    def __init__(self, layer: nn.Linear | _Quantised, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False, device="meta")
        self.up = nn.Linear(rank, layer.out_features, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.up(self.down(x))
        return result


class _Quantised(nn.Module):
    """A linear layer whose frozen weight is in fewer bits.

    nf4: two codes a byte, a byte for each 64 values, 4 bytes for each 256 of these (bitsandbytes, double quantised).
    int8, fp8: a byte a value, and an fp32 scale for each row (bitsandbytes' int8, torchao's float8 with rows).

    Args:
        layer: the layer, on the meta device.
        form: the format.
    """

    def __init__(self, layer: nn.Linear, form: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        rows, numel = layer.out_features, layer.in_features * layer.out_features
        if form == "nf4":
            scales = -(-numel // 64)
            shapes = [((-(-numel // 2), 1), torch.uint8), ((scales, 1), torch.uint8)]
            shapes += [((-(-scales // 256), 1), torch.float32)]
        else:
            dtype = torch.int8 if form == "int8" else torch.float8_e4m3fn
            shapes = [((rows, layer.in_features), dtype), ((rows, 1), torch.float32)]
        for name, (shape, dtype) in zip(("codes", "scales", "scales_of_scales"), shapes, strict=False):
            values = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Dequantised.apply(x, self.out_features)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias


class _Dequantised(torch.autograd.Function):
    """The shapes of a product with a weight that is dequantised in forward and in backward, and saved in neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty((*x.shape[:-1], width))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.shape), None


def _in_blocks(model: Sized, kinds: type | tuple[type, ...]) -> list[tuple[str, Any]]:
    """The modules of some classes in blocks, with their names."""
    blocks = {name for name, _ in blocks_of(model.module)}
    modules = [*model.module.named_modules()]
    return [(n, one) for n, one in modules if isinstance(one, kinds) and _innermost(n, blocks) != ROOT]


def _quantise(model: Sized, form: str) -> None:
    """Quantises the frozen linear layers of blocks, as transformers does. What is no nn.Linear stays as it is."""
    for name, layer in _in_blocks(model, nn.Linear):
        if not layer.weight.requires_grad:
            model.module.set_submodule(name, _Quantised(layer, form))


def _adapt(model: Sized, rank: int) -> None:
    """Freezes the model, and gives each linear layer of its blocks an adapter: peft's target_modules="all-linear"."""
    model.module.requires_grad_(False)
    for name, layer in _in_blocks(model, (nn.Linear, _Quantised)):
        model.module.set_submodule(name, _Adapted(layer, rank))
