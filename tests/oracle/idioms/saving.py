"""Code that saves, loads, copies and averages the state of models, and operates on their structure."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from tests.oracle.harness import Run, idiom
from tests.oracle.models import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Block,
    TinyLm,
    adamw,
    learn,
    token_batches,
    token_loss,
    vector_batches,
)


@idiom(
    "keeps a deep copy of the best state, and loads it at the end",
    source="huggingface/setfit scripts/setfit/run_fewshot_multilabel.py:103",
)
def best_state_loaded(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    held_out = next(token_batches(1, seed=5))
    best, best_loss = copy.deepcopy(model.state_dict()), float("inf")
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        with torch.no_grad():
            now = token_loss(model, *held_out).item()
        if now < best_loss:
            best, best_loss = copy.deepcopy(model.state_dict()), now
        run.log(loss, now)
    run.log(model, best)
    model.load_state_dict(best)
    with torch.no_grad():
        run.log(token_loss(model, *held_out))
    run.log(model)


@idiom(
    "goes back to cloned weights for each second step, as a trial",
    source="Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/model_checkpoint.py:383",
)
def trial_steps_taken_back(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for number, (tokens, targets) in enumerate(token_batches()):
        saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        with torch.no_grad():
            run.log(loss, token_loss(model, tokens, targets))
        if number % 2:
            model.load_state_dict(saved)
    run.log(model)


@idiom(
    "saves the state with torch.save at each step, and loads it into another model",
    source="pytorch/examples imagenet/main.py:302",
)
def saved_by_torch(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    other = TinyLm(2)
    for step, (tokens, targets) in enumerate(token_batches()):
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        file = io.BytesIO()
        torch.save({"step": step, "state_dict": model.state_dict(), "loss": loss.item()}, file)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        other.load_state_dict(loaded["state_dict"])
        with torch.no_grad():
            run.log(loss, loaded["step"], token_loss(other, tokens, targets))
    run.log(model, other)


@idiom(
    "saves the state of one layer, which takes no more space than the layer",
    source="huggingface/peft src/peft/utils/save_and_load.py:131",
)
def one_layer_saved(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        file = io.BytesIO()
        torch.save(model.blocks[1].get_submodule("norm").state_dict(), file)
        assert file.tell() < 3000, "more was saved than a layer of 64 bytes and what a file needs"
        file.seek(0)
        run.log(loss, torch.load(file, weights_only=True))
    run.log(model)


@idiom(
    "saves the state as safetensors",
    source="huggingface/diffusers src/diffusers/loaders/lora_base.py:1060",
)
def saved_as_safetensors(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    other = TinyLm()
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        saved = safetensors.torch.save(model.state_dict())
        other.load_state_dict(safetensors.torch.load(saved))
        run.log(loss, len(saved) // 1000, other.head.weight)
    run.log(model, other)


@idiom(
    "saves a model with tied weights as safetensors, and loads it",
    source="UKPLab/sentence-transformers sentence_transformers/models/Module.py:409",
)
def tied_model_saved(run: Run) -> None:
    model, other = TinyLm(2, tied=True), TinyLm(2, tied=True)
    optimizer = run.hold(model, adamw(model))
    for number, (tokens, targets) in enumerate(token_batches()):
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        if number in (1, 5):
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder) / "model.safetensors")
                safetensors.torch.save_model(model, file)
                names = safetensors.torch.load_file(file)
                safetensors.torch.load_model(other, file)
            run.log(len(names), token_loss(other, tokens, targets))
    run.log(model, other)


@idiom(
    "saves the whole module, and loads a module that runs",
    source="pytorch/examples word_language_model/main.py:237",
    bf16=False,
)
def whole_module_pickled(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for number, (tokens, targets) in enumerate(token_batches()):
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        if number in (2, 5):
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            again = token_loss(loaded, tokens, targets)
            again.backward()
            run.log(again, loaded.head.weight.grad)
    run.log(model, loaded)


@idiom("loads a part of another state, not strictly", source="facebookresearch/dino eval_image_retrieval.py:155")
def part_of_state_loaded(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    other = {"module." + name: value for name, value in TinyLm().state_dict().items() if "blocks.1" in name}
    for number, (tokens, targets) in enumerate(token_batches()):
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        if number == 2:
            state = {name.replace("module.", ""): value for name, value in other.items()} | {"unknown": torch.ones(1)}
            result = model.load_state_dict(state, strict=False)
            run.log(len(result.missing_keys), len(result.unexpected_keys))
        if number == 3:
            model.blocks[0].load_state_dict(model.blocks[2].state_dict())
    run.log(model)


@idiom(
    "trains from the same weights for each client and loads the mean",
    source="AshwinRJ/Federated-Learning-PyTorch src/federated_main.py:95",
)
def federated_averaging(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    batches = list(token_batches())
    for number in range(2):
        together = copy.deepcopy(model.state_dict())
        found = []
        for tokens, targets in batches[3 * number : 3 * number + 3]:
            model.load_state_dict(together)
            loss = token_loss(model, tokens, targets)
            learn(optimizer, loss)
            found.append(copy.deepcopy(model.state_dict()))
            run.log(loss)
        mean = found[0]
        for name in mean:
            for one in found[1:]:
                mean[name] += one[name]
            mean[name] = torch.div(mean[name], len(found))
        model.load_state_dict(mean)
    run.log(model)


@idiom("mixes a soup of states and evaluates it in a plain model", source="mlfoundations/model-soups main.py:121")
def soup_of_states(run: Run) -> None:
    model, other = TinyLm(), TinyLm()
    optimizer = run.hold(model, adamw(model))
    soup: dict[str, Tensor] = {}
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        for name, value in model.state_dict().items():
            soup[name] = value * (1 / 6) + soup.get(name, 0)
        run.log(loss)
    other.load_state_dict(soup)
    with torch.no_grad():
        run.log(token_loss(other, tokens, targets))
    run.log(model, other)


@idiom(
    "rewinds to the first weights, with small ones masked in every forward",
    source="facebookresearch/open_lth pruning/pruned_model.py:37",
)
def rewound_and_masked(run: Run) -> None:
    class Masked(nn.Module):
        """Multiplies weights by masks in its forward, then calls forward of the model it wraps."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.masks: dict[str, Tensor] = {}

        def forward(self, tokens: Tensor) -> Tensor:
            for name, param in self.model.named_parameters():
                if name in self.masks:
                    param.data *= self.masks[name]
            out: Tensor = self.model.forward(tokens)
            return out

    model = Masked(TinyLm())
    optimizer = run.hold(model, adamw(model))
    first = {name: value.clone() for name, value in model.model.state_dict().items()}
    for number, (tokens, targets) in enumerate(token_batches()):
        if number == 3:
            for name, param in model.model.named_parameters():
                if param.ndim == 2:
                    model.masks[name] = (param.data.abs() > param.data.abs().median()).to(param.dtype)
            model.model.load_state_dict(first)
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "takes and sets the state by functions of torch.distributed.checkpoint",
    source="huggingface/accelerate src/accelerate/accelerator.py:4059",
)
def state_by_distributed_checkpoint(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    saved: dict[str, Any] = {}
    for number, (tokens, targets) in enumerate(token_batches()):
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        if number == 2:
            state: Any = get_model_state_dict(model)
            saved = {name: value.clone() for name, value in state.items()}
        if number == 4:
            set_model_state_dict(model, saved)
    run.log(model, saved, get_model_state_dict(model))


@idiom(
    "evaluates features with the head replaced by Identity for a while",
    source="facebookresearch/dino eval_knn.py:66",
)
def head_replaced_for_a_while(run: Run) -> None:
    model: Any = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        head, model.head = model.head, nn.Identity()
        with torch.no_grad():
            features = F.normalize(model(tokens).float().mean(1), dim=1)
        model.head = head
        run.log(loss, features @ features.t())
    run.log(model)


@idiom(
    "saves a copy of the model in half precision",
    source="ultralytics/yolov5 segment/train.py:457",
)
def half_precision_copy(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        small = copy.deepcopy(model).to(torch.bfloat16)
        with torch.no_grad():
            run.log(loss, *small.float().parameters())
    run.log(model)


@idiom(
    "stays near a frozen copy of itself",
    source="huggingface/trl trl/experimental/utils.py:995",
)
def near_a_frozen_copy(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    reference = copy.deepcopy(model).eval()
    for param in reference.parameters():
        param.requires_grad = False
    for tokens, targets in token_batches():
        logits = model(tokens).float().log_softmax(-1)
        with torch.no_grad():
            wanted = reference(tokens).float().log_softmax(-1)
        far = F.kl_div(logits, wanted, log_target=True, reduction="batchmean")
        loss = F.nll_loss(logits.flatten(0, 1), targets.flatten()) + 0.1 * far
        learn(optimizer, loss)
        run.log(loss, far)
    run.log(model, reference)


@idiom(
    "crops positions and extends the vocabulary before training",
    source="karpathy/nanoGPT model.py:201",
)
def structure_changed_before(run: Run) -> None:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY - 3, WIDTH), nn.Embedding(4 * LENGTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, VOCABULARY - 3, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.head(x)
            return out

    model = Positioned()
    model.wpe.weight = nn.Parameter(model.wpe.weight[:LENGTH])
    wider = nn.Embedding(VOCABULARY, WIDTH)
    wider.weight.data[: VOCABULARY - 3] = model.wte.weight.data
    model.wte = wider
    model.head.weight = wider.weight
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        assert model.head.weight is model.wte.weight
        run.log(loss)
    run.log(model)


@idiom(
    "takes weights out as NumPy arrays, and another implementation runs with them",
    source="DLR-RM/stable-baselines3 stable_baselines3/common/policies.py:201",
    bf16=False,
)
def weights_as_arrays(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(6, 3):
        loss = F.mse_loss(model(x), target)
        learn(optimizer, loss)
        arrays = {name: value.cpu().numpy() for name, value in model.state_dict().items()}
        hidden = (x.numpy() @ arrays["0.weight"].T + arrays["0.bias"]).clip(min=0)
        run.log(loss, torch.from_numpy(hidden @ arrays["2.weight"].T + arrays["2.bias"]))
        copied = [param.detach().cpu().tolist() for param in model.parameters()]
        run.log(*copied)
    run.log(model)
