"""Pretrained models of the transformers library, which are never in memory as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.initialization import meta_device_safe_creation_ops
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import local_torch_dtype
from transformers.quantizers.auto import get_hf_quantizer

from offload import ConfigError, OffloadZero
from offload.integrations.quantised import kept_as, parts_of, skeleton
from offload.io.regular import check_file
from offload.model.guard import is_held
from offload.model.inner import is_composite
from offload.model.loss import LateLogits, LossLinear
from offload.model.meta_init import FromSafetensors, Kept, PartOfModel, Parts, Source

LIBRARIES = ("transformers", "bitsandbytes", "torchao")
"""Those whose versions decide what a quantised weight is."""


def from_pretrained(
    kind: Any,
    directory: str | os.PathLike[str],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    *,
    quantization_config: Any = None,
    base: str | os.PathLike[str] | Literal[False] | None = None,
    adapt: Callable[[Any], Any] | None = None,
    init_missing: bool = False,
    **options: Any,
) -> tuple[Any, OffloadZero]:
    """A pretrained model and its optimizer; each weight is read once, and goes straight to its tier.

        model, optimizer = from_pretrained(
            AutoModelForCausalLM, "llama", partial(torch.optim.AdamW, lr=1e-5), path="./run1", param_tier="nvme"
        )

    The model is what `kind.from_pretrained(directory)` gives, in evaluation mode, too. There are two differences: what
    OffloadZero changes, and that parameters stay frozen which the model's constructor freezes (Whisper's positions).
    Names that transformers changes on load, and weights that it merges or splits, are converted by transformers.

    Args:
        kind: a class of models, such as transformers.AutoModelForCausalLM or transformers.LlamaForCausalLM.
        directory: with config.json and safetensors, as `save_pretrained` writes them. Nothing is downloaded.
        optimizer: makes a torch optimizer of the parameters that are trained; None: AdamW with torch's defaults.
        quantization_config: how transformers quantises the model, such as a BitsAndBytesConfig or a TorchAoConfig. It
            is done matrix by matrix, so that at most one is in RAM before it is quantised. Of files that hold a
            quantised model it is not needed.
        base: the directory where a quantised base that streams from NVMe is kept, for this run and others; None: the
            run's first one. False: it is not kept, and so may be written to.
        adapt: called with the model while its weights have no values; returns the model to train, such as
            `partial(get_peft_model, peft_config=LoraConfig(...))` for adapters on a base that is never in memory.
        init_missing: whether weights that the files lack are made by the model's own initialisation.
        **options: of OffloadZero, but for `init`.

    Returns:
        The model, which is held, and its optimizer.

    Raises:
        ConfigError: if the files lack weights, weights cannot be converted or quantised, or `adapt` added some without
            values; it names them.
        OffloadError: as OffloadZero.
    """
    path = Path(directory)
    try:
        check_file(path / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} has no config.json that can be read ({error}): give the directory of a model, which is not "
            "downloaded"
        ) from error
    model = _on_meta(kind, path)
    files = PretrainedFiles(path, init_missing=init_missing)
    if quantization_config is not None or getattr(model.config, "quantization_config", None) is not None:
        files.quantiser = Quantiser(model, quantization_config, files)
        if base is not False:
            files.keep(model, base)
    source: Source = files
    params = list(model.parameters())
    if adapt is not None:
        source = PartOfModel(source, model)
        model = adapt(model)
        _initialise_adapters(model)
        params = [param for param in model.parameters() if param.requires_grad]
    adam = None if optimizer is None else optimizer(params)
    return model, OffloadZero(model, adam, init=source, **options)


def fuse_loss(model: Any) -> Any:
    """Makes a causal language model compute its loss without its logits; call it before OffloadZero.

        model = fuse_loss(AutoModelForCausalLM.from_pretrained("llama"))
        optimizer = OffloadZero(model, ...)

    In training `model(input_ids, labels=labels)` then returns the same loss up to rounding, by `linear_cross_entropy`,
    and `logits=None`. `num_items_in_batch`, `shift_labels`, soft caps and scales of logits count as before, and so do
    losses that the model adds (routers of experts). A forward without labels, in evaluation or without gradients is as
    it was. What reads the logits of a training forward inside the model gets them, computed as ever, and saves nothing.

    Args:
        model: of transformers, with a plain nn.Linear as output layer and the loss of causal language models.

    Returns:
        The model, which was changed in place: its output layer has another class, `offload.model.loss.LossLinear`.

    Raises:
        ConfigError: for a model with another loss, or another output layer, and one that is held already.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    name = type(model).__name__
    if isinstance(head, LossLinear):
        return model
    if type(head) is not nn.Linear or "forward" in vars(head):
        raise ConfigError(
            f"the output layer of {name} is {type(head).__name__}, and fuse_loss needs a plain nn.Linear: call it on a "
            "model for causal language modelling, before adapters or quantisation change that layer"
        )
    if is_held(head.weight):
        raise ConfigError(f"fuse_loss came after OffloadZero, which holds {name} already: call it before")
    if model.loss_function is not ForCausalLMLoss:
        raise ConfigError(
            f"the loss of {name} is {getattr(model.loss_function, '__name__', model.loss_function)}, and fuse_loss "
            "knows ForCausalLMLoss of transformers only: call offload.linear_cross_entropy in that loss"
        )
    head.__class__ = LossLinear
    model.loss_function = _loss_of_late_logits
    model.register_forward_hook(_without_late_logits)
    return model


def _loss_of_late_logits(
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """As transformers' ForCausalLMLoss, also of logits that are not computed yet."""
    if not isinstance(logits, LateLogits):
        made: Tensor = ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **options
        )
        return made
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return logits.loss(shift_labels, num_items=num_items_in_batch, ignore_index=ignore_index)


def _without_late_logits(model: Any, args: Any, output: Any) -> Any:
    """Takes logits that were not needed from what a model returns; without a loss they are computed."""
    if isinstance(output, tuple):
        has_loss = isinstance(output[0], Tensor) and not output[0].dim()
        return tuple(_or_none(one, has_loss) for one in output)
    if isinstance(output, dict):  # ModelOutput
        has_loss = output.get("loss") is not None
        for key, value in output.items():
            if isinstance(value, LateLogits):
                output[key] = _or_none(value, has_loss)
    return output


def _or_none(value: Any, has_loss: bool) -> Any:
    if not isinstance(value, LateLogits):
        return value
    return None if has_loss else value.computed()


def _on_meta(kind: Any, path: Path) -> Any:
    is_auto = hasattr(kind, "from_config")
    config = (transformers.AutoConfig if is_auto else kind.config_class).from_pretrained(path)
    config.name_or_path = str(path)
    build = kind.from_config if is_auto else kind._from_config
    with torch.device("meta"), meta_device_safe_creation_ops():
        model = build(config, dtype=config.dtype or torch.float32)
    if model.can_generate() and (path / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.eval()


def _initialise_adapters(model: Any) -> None:
    """Gives the adapters of peft their first values.

    peft has put them on the meta device, where the weights beside them are.

    Raises:
        ConfigError: for a way to make adapters that needs these weights.
    """
    for name, module in model.named_modules():
        if not callable(getattr(module, "reset_lora_parameters", None)):
            continue
        for kind in module.adapter_layer_names:
            layers = getattr(module, kind)
            if isinstance(layers, nn.Module) and any(param.is_meta for param in layers.parameters()):
                layers.to_empty(device="cpu")
        for adapter in module.r:
            how = model.peft_config[adapter].init_lora_weights
            if how not in (True, "gaussian"):
                raise ConfigError(
                    f"adapt made {name} with init_lora_weights={how!r}: only True and 'gaussian' need no weights of "
                    "the model, which have no values yet"
                )
            module.reset_lora_parameters(adapter, how)


class Offload(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is not there where types are checked
    """A callback with which Trainer trains over several ranks. Give it last, after callbacks that decide when to save.

        trainer = Trainer(model, args, callbacks=[Offload(optimizer)], optimizers=(optimizer, None), ...)

    Trainer then gives the held model no DistributedDataParallel: OffloadZero averages over the ranks. All ranks commit
    before rank 0 saves. At stage 3 they gather the whole model for that, which has to fit `device_memory`. An optimizer
    with accumulation="auto" gets Trainer's `gradient_accumulation_steps`.

    Args:
        optimizer: of the model that Trainer trains.
    """

    def __init__(self, optimizer: OffloadZero) -> None:
        self._optimizer = optimizer
        self._gathered = ExitStack()

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        from accelerate import Accelerator  # Trainer has it

        # Trainer's own is out of reach; all of them share their state.
        Accelerator().prepare_model(model, evaluation_mode=True)  # which wraps nothing

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._optimizer.accumulation = args.gradient_accumulation_steps

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if control.should_save:
            self._prepare_to_save(model)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if args.save_strategy == "best":  # whether it is the best is decided after this
            self._prepare_to_save(model)

    def _prepare_to_save(self, model: Any) -> None:
        self._gathered.close()
        self._optimizer.consolidate_state_dict()
        stats = self._optimizer.stats()
        if stats["stage"] == 3 and stats["ranks"] > 1:
            self._gathered.enter_context(self._optimizer.gathered(model))

    def _is_saved(self, *_: Any, **__: Any) -> None:
        self._gathered.close()

    on_save = on_step_begin = on_train_end = _is_saved


class Quantiser:
    """Quantises the weights of a model as transformers does while it loads one.

    Args:
        model: the model on the meta device, which gets the modules and the weights that it will have, without values.
        given: the configuration; None: the one that the model was saved with.
        files: the model's files.

    Raises:
        ConfigError: if transformers cannot quantise the model, or not in this way.
    """

    def __init__(self, model: Any, given: Any, files: PretrainedFiles) -> None:
        device_map = {"": "cpu"}
        paths = list(dict.fromkeys(map(str, files.files.values())))
        try:
            found = get_hf_quantizer(model.config, given, device_map, weights_only=True, user_agent={})
            self.transformers: Any = found[0]
            with local_torch_dtype(model.dtype):  # the modules that it puts in have it, as in from_pretrained
                self.transformers.preprocess_model(
                    model=model, dtype=model.dtype, device_map=device_map, checkpoint_files=paths
                )
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"transformers cannot quantise {type(model).__name__}: {error}") from error
        if self.transformers.quantization_config.quant_method == "bitsandbytes":
            _make_bitsandbytes_tables()
        self.plain: Any = skeleton(model)
        """The model with the modules that it will have, before weights are quantised."""
        for name, weight in self.plain.named_parameters():
            if self.transformers.param_needs_quantization(self.plain, name):
                module, _, own = name.rpartition(".")
                # Where it was saved as a quantised one, it has that dtype already.
                values = weight if weight.is_floating_point() else torch.empty_like(weight, dtype=model.dtype)
                model.get_submodule(module)._parameters[own] = self.quantised(name, values.detach())
        self.transformers.postprocess_model(model)
        model.hf_quantizer = self.transformers

    def quantised(self, name: str, values: Tensor) -> Any:
        """The quantised weight of a name; of values on the meta device one without values.

        Raises:
            ConfigError: if transformers cannot quantise it.
        """
        prefix, _, own = name.rpartition(".")
        module = self.plain.get_submodule(prefix)
        before: Any = module._parameters[own]
        attributes = dict(vars(module))
        about = {"full_layer_name": name, "missing_keys": set(), "config": self.plain.config}
        try:
            if values.is_meta and hasattr(before, "_quantize"):  # bitsandbytes' would wait for another device
                options = {key: value for key, value in vars(before).items() if key not in ("CB", "SCB")}
                return type(before)(values, requires_grad=False, **options)._quantize(values.device)
            made = self.transformers.get_quantize_ops().convert({name: [values]}, model=self.plain, **about)
            weight = made.get(name, module._parameters[own])
        except Exception as error:
            raise ConfigError(f"transformers cannot quantise {name}: {error}") from error
        finally:
            vars(module).update(attributes)
            module._parameters[own] = before
        return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)


def _make_bitsandbytes_tables() -> None:
    """Makes a table that bitsandbytes keeps where it is first used, which the meta device must not be."""
    import bitsandbytes

    bitsandbytes.functional.quantize_blockwise(torch.ones(1, device="cpu"))


class PretrainedFiles(FromSafetensors):
    """The safetensors of a model, under the names that transformers gives their tensors when it loads them."""

    def __init__(self, path: Path, *, init_missing: bool = False) -> None:
        super().__init__(path, init_missing=init_missing)
        self.quantiser: Quantiser | None = None
        self._kept: Kept | None = None
        self._model: Any = None
        self._keys: dict[str, str] = {}  # of what is only renamed, by name in the model
        self._converters: dict[str, Any] = {}  # by the first name that they make
        self._made_by: dict[str, str] = {}  # the first name, by all of them
        self._made: dict[str, Tensor] = {}  # what was made, and not asked for yet

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, transformers.PreTrainedModel):
            raise ConfigError(f"{type(model).__name__} is no model of transformers: give a PreTrainedModel")
        quantiser = None if self.quantiser is None else self.quantiser.transformers
        self._model = plain = model if self.quantiser is None else self.quantiser.plain
        transforms: list[Any] = get_model_conversion_mapping(plain, hf_quantizer=quantiser)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        converter_of = {pattern: one for one in converters for pattern in one.source_patterns}
        wanted, base = plain.state_dict(), model.base_model_prefix
        for key in sorted(self.files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, base, wanted)
            if name not in wanted and key in wanted:
                name, pattern = rename_source_key(key, [], [], base, wanted)
            if name not in wanted:
                continue
            if pattern is None:
                self._keys[name] = key
                continue
            if name not in self._converters:
                self._converters[name] = deepcopy(converter_of[pattern])
            converter = self._converters[name]
            converter.add_tensor(name, key, pattern, partial(self.tensor, key))
            first = converter.target_patterns[0]
            self._made_by |= {name.replace(first, other): name for other in converter.target_patterns}
        super().check(model)

    def keep(self, model: Any, base: str | os.PathLike[str] | None) -> None:
        """Keeps the quantised base of a model, which has its quantised parameters now."""
        assert self.quantiser is not None
        settings = [self.quantiser.transformers.quantization_config.to_json_string(), type(model).__name__, model.dtype]
        settings += [f"{name} {version(name)}" for name in LIBRARIES if find_spec(name) is not None]
        self._kept = kept_as(self, "; ".join(map(str, settings)), base, model)

    def kept(self) -> Kept | None:
        return self._kept

    def has(self, name: str) -> bool:
        return name in self._keys or name in self._made_by

    def read(self, name: str) -> Tensor:
        if name in self._keys:
            return self.tensor(self._keys[name])
        if name not in self._made:
            self._convert(self._made_by[name])
        if name not in self._made:
            raise ConfigError(f"transformers makes no {name} from what is in the files")
        return self._made.pop(name)

    def make(self, prefix: str, module: nn.Module, names: Collection[str]) -> Mapping[str, Parts]:
        found = {}
        for own in names:
            name = prefix + own
            if self.quantiser is None or not self.has(name):
                return super().make(prefix, module, names)
            value = self.read(name)
            if not is_composite(value):  # it was not saved as a quantised one
                dtype = self.quantiser.plain.get_parameter(name).dtype
                value = self.quantiser.quantised(name, value.to(dtype))
            found[own] = parts_of(value)
        return found

    def _convert(self, name: str) -> None:
        converter = self._converters[name]
        keys = ", ".join(sorted(converter.layer_targets[name]))
        try:
            made = converter.convert(name, model=self._model, config=self._model.config)
        except Exception as error:
            raise ConfigError(f"transformers cannot make {name} from {keys}: {error}") from error
        self._made |= {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
