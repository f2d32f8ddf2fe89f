"""Code that reads parameters outside the forward of the module that owns them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    train_tokens,
    vector_batches,
)


class _MeanWeight(TinyLm):
    def forward(self, tokens: Tensor) -> Tensor:
        blocks: Any = self.blocks
        mean = torch.stack([block.up.weight for block in blocks]).mean(0)
        x = self.embedding(tokens)
        x = x + F.linear(F.linear(x, mean), mean.t())
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


@idiom(
    "the root stacks a weight of each block before it calls any",
    source="lucidrains/x-transformers x_transformers/x_transformers.py:1731",
)
def mean_of_block_weights(run: Run) -> None:
    train_tokens(run, _MeanWeight())


class _BiasedBlock(nn.Module):
    """Attention without projections, with a bias that the first block owns and hands on."""

    def __init__(self, *, has_table: bool) -> None:
        super().__init__()
        if has_table:
            self.table = nn.Embedding(2 * LENGTH - 1, 1)
        self.inner = Block()

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            positions = torch.arange(x.shape[1])
            bias = self.table(positions[:, None] - positions[None, :] + LENGTH - 1).squeeze(-1)
        scores = x @ x.transpose(1, 2) / math.sqrt(WIDTH) + bias
        return self.inner(scores.softmax(-1) @ x + x), bias


class _SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_BiasedBlock(has_table=number == 0) for number in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, bias = self.embedding(tokens), None
        for block in self.blocks:
            x, bias = block(x, bias)
        out: Tensor = self.head(x)
        return out


@idiom(
    "the first block computes a position bias from its table, later blocks use it",
    source="huggingface/transformers src/transformers/models/t5/modeling_t5.py:346",
)
def bias_from_first_block(run: Run) -> None:
    train_tokens(run, _SharedBias())


class _TableInBlock(_SharedBias):
    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        first = self.blocks[0]
        assert isinstance(first, _BiasedBlock)
        index = (positions[:, None] - positions[None, :] + LENGTH - 1).view(-1)
        bias = first.table.weight[index].view(len(positions), len(positions))
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x, bias)
        out: Tensor = self.head(x)
        return out


@idiom(
    "the root indexes a table that block 0 owns and gives the bias to all blocks",
    source="huggingface/pytorch-image-models timm/models/beit.py:443",
)
def table_of_first_block(run: Run) -> None:
    train_tokens(run, _TableInBlock())


class _LastWeight(TinyLm):
    def forward(self, tokens: Tensor) -> Tensor:
        last: Any = self.blocks[-1]
        x = self.embedding(tokens) @ last.up.weight.t()
        x = x @ last.up.weight
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x @ last.down.weight @ last.up.weight))
        return out


@idiom(
    "the root multiplies by weights of its last block, before and after the blocks",
    source="huggingface/transformers src/transformers/models/deberta_v2/modeling_deberta_v2.py:865",
)
def weight_of_last_block(run: Run) -> None:
    train_tokens(run, _LastWeight())


class _TiedLogits(nn.Module):
    """The embedding is in a Sequential, so in a unit of its own; the root projects with it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem: Any = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = x @ self.stem[0].weight.t()
        return out


@idiom(
    "logits are a product with the transposed weight of the embedding",
    source="lucidrains/x-transformers x_transformers/x_transformers.py:3967",
)
def logits_by_embedding(run: Run) -> None:
    train_tokens(run, _TiedLogits())


class _JoinedHead(TinyLm):
    def __init__(self) -> None:
        super().__init__()
        self.rest: Any = nn.ModuleList([nn.Linear(VOCABULARY, WIDTH // 2, bias=False)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        half = WIDTH // 2
        matrix = torch.cat([self.embedding.weight.t()[:half], self.rest[0].weight], dim=0)
        out: Tensor = self.norm(x).matmul(matrix)
        return out


@idiom(
    "the output matrix is concatenated from two modules' weights",
    source="huggingface/transformers src/transformers/models/mobilebert/modeling_mobilebert.py:505",
)
def joined_output_matrix(run: Run) -> None:
    train_tokens(run, _JoinedHead())


class _Trunk(TinyLm):
    """Returns hidden states: the criterion does the projection."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


@idiom("the criterion is given the decoder's weight", source="salesforce/awd-lstm-lm main.py:197")
def criterion_with_decoder_weight(run: Run) -> None:
    model = _Trunk()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        hidden = model(tokens)
        loss = F.cross_entropy(F.linear(hidden, model.head.weight).float().flatten(0, 1), targets.flatten())
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "the loss is computed in chunks of tokens, each with the head's weight",
    source="huggingface/trl trl/trainer/dpo_trainer.py:809",
)
def chunked_head_loss(run: Run) -> None:
    model = _Trunk()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        hidden, wanted = model(tokens).flatten(0, 1), targets.flatten()
        loss = hidden.new_zeros(())
        for part, labels in zip(hidden.chunk(3), wanted.chunk(3), strict=True):
            loss = loss + F.cross_entropy((part @ model.head.weight.t()).float(), labels, reduction="sum")
        loss = loss / wanted.numel()
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "adds the squared norm of all weights to the loss, after the forward",
    source="thuml/Transfer-Learning-Library tllib/regularization/delta.py:31",
)
def l2_penalty(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        for param in model.parameters():
            loss = loss + 0.5 * 1e-2 * torch.norm(param) ** 2
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "computes a penalty of absolute weights before the forward",
    source="csdongxian/AWP AT_AWP/train_cifar10.py:356",
)
def l1_penalty_before_forward(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        penalty = sum((param.abs().sum() for param in model.parameters()), torch.zeros(()))
        loss = token_loss(model, tokens, targets) + 1e-3 * penalty
        learn(optimizer, loss)
        run.log(loss, penalty)
    run.log(model)


@idiom(
    "pulls weights to where they started",
    source="thuml/Transfer-Learning-Library tllib/regularization/delta.py:65",
)
def distance_from_start(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    for tokens, targets in token_batches():
        far = sum(((param - start[name]).pow(2).sum() for name, param in model.named_parameters()), torch.zeros(()))
        loss = token_loss(model, tokens, targets) + 0.1 * far
        learn(optimizer, loss)
        run.log(loss, far)
    run.log(model)


@idiom(
    "adds a penalty for matrices that are not orthogonal, found by name",
    source="huggingface/peft src/peft/tuners/adalora/model.py:251",
)
def orthogonality_penalty(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        found, penalty = 0, torch.zeros(())
        for name, param in model.named_parameters():
            if "up.weight" in name or "down.weight" in name:
                gram = param.T @ param if param.shape[0] > param.shape[1] else param @ param.T
                penalty = penalty + torch.norm(gram - torch.eye(*gram.size(), dtype=gram.dtype), p="fro")
                found += 1
        loss = loss + 0.1 * penalty / found
        learn(optimizer, loss)
        run.log(loss, penalty)
    run.log(model)


@idiom(
    "keeps blocks apart with the cosine of their flattened weights",
    source="RoyalVane/CLAN CLAN_train.py:358",
)
def diversity_of_blocks(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        flat = [torch.cat([param.flatten() for param in block.parameters()]) for block in model.blocks]
        for one, other in itertools.pairwise(flat):
            loss = loss + F.cosine_similarity(one, other, dim=0) ** 2
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "logs the norm of all weights after each step",
    source="murnanedaniel/exatrkx-ctd2020 GraphLearning/src/utils/checks.py:5",
)
def norm_of_all_weights(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        norms = torch.stack([param.norm() for param in model.parameters()])
        by_data = math.sqrt(sum(param.data.norm(2).item() ** 2 for param in model.parameters()))
        run.log(loss, norms, norms.norm(), by_data)
    run.log(model)


@idiom(
    "logs a histogram of each weight, by way of NumPy",
    source="Cyanogenoid/lczero-training pytorch/summary.py:22",
    bf16=False,
)
def histograms_of_weights(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        for param in model.parameters():
            values = param.detach().cpu().numpy()
            run.log(float(values.mean()), float(values.max()), torch.histc(param.data.float(), 1, -9, 9))
    run.log(model)


@idiom("counts and describes parameters", source="karpathy/nanoGPT model.py:157")
def counts_and_shapes(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        assert all(param.data.dtype == next(model.parameters()).dtype for param in model.parameters())
        assert {param.device for param in model.parameters()} == {torch.device("cpu")}
        count = sum(param.numel() for param in model.parameters() if param.requires_grad)
        count_in_bytes = sum(param.nelement() * param.element_size() for param in model.parameters())
        matrices = [param for param in model.parameters() if param.dim() >= 2 and param.is_leaf]
        assert count_in_bytes % count == 0
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        shapes = [list(param.shape) for param in matrices]
        run.log(loss, count, len(matrices), sum(math.prod(shape) for shape in shapes), model.head.weight.size(0))
    run.log(model)


@idiom(
    "follows the trajectory as one vector",
    source="DLR-RM/stable-baselines3 stable_baselines3/common/policies.py:201",
)
def trajectory_as_vector(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        now = nn.utils.parameters_to_vector(model.parameters()).detach()
        run.log(loss, (now - before).norm(), now[::7])
        before = now.clone()
    run.log(model)


@idiom(
    "logs the spectral norm of each matrix",
    source="hhnqqq/MyTransformers common/lora_modules/lora_utils/check_nuc_norm.py:8",
    bf16=False,
)
def spectral_norm_of_matrices(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        for param in model.parameters():
            if param.dim() == 2:
                run.log(torch.linalg.matrix_norm(param, ord=2), torch.aminmax(param).max, param.std())
    run.log(model)


class _TwoTowers(nn.Module):
    """Methods for each tower; forward is never called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.text = nn.Sequential(Block(), Block())
        self.vision: Any = nn.Sequential(nn.Linear(5, WIDTH), Block())
        self.projection = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.vision[0].weight.dtype
        return dtype

    def encode_text(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.text(self.embedding(tokens)).mean(1) @ self.projection
        return out

    def encode_image(self, image: Tensor) -> Tensor:
        out: Tensor = self.vision(image.type(self.dtype))
        return out

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        images = F.normalize(self.encode_image(image), dim=-1)
        texts = F.normalize(self.encode_text(tokens), dim=-1)
        return self.logit_scale.exp() * images @ texts.t()


@idiom("trains by the methods for text and images, not by forward", source="openai/CLIP clip/model.py:340")
def methods_beside_forward(run: Run) -> None:
    model = _TwoTowers()
    optimizer = run.hold(model, adamw(model))
    for (tokens, _), (images, _) in zip(token_batches(), vector_batches(5, 1, batch=4), strict=True):
        image = F.normalize(model.encode_image(images), dim=-1)
        text = F.normalize(model.encode_text(tokens), dim=-1)
        logits = (model.logit_scale.exp() * image @ text.t()).float()
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        learn(optimizer, loss)
        run.log(loss, model.logit_scale)
    with torch.no_grad():
        run.log(model(images, tokens))
    run.log(model)


class _Generator(TinyLm):
    @torch.no_grad()
    def generate(self, tokens: Tensor, more: int) -> Tensor:
        for _ in range(more):
            logits = self(tokens[:, -LENGTH:])[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        return tokens

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


@idiom("generates between steps", source="karpathy/minGPT mingpt/model.py:283", bf16=False)
def generates_between_steps(run: Run) -> None:
    model = _Generator()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = model.loss(tokens, targets)
        learn(optimizer, loss)
        model.eval()
        run.log(loss, model.generate(tokens[:1, :2], 4))
        model.train()
    run.log(model)


@idiom(
    "uses parts of the model directly, as feature extractor and classifier",
    source="facebookresearch/DomainBed domainbed/algorithms.py:554",
)
def parts_called_directly(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        x = model.embedding(tokens)
        for block in model.blocks[:2]:
            x = block(x)
        loss = F.cross_entropy(model.head(model.norm(x)).float().flatten(0, 1), targets.flatten())
        with torch.no_grad():
            last = model.blocks[-1](x).pow(2).mean()
        learn(optimizer, loss)
        run.log(loss, last)
    run.log(model)


@idiom(
    "goes through children and applies functional operations with their weights",
    source="fhvilshoj/TorchLRP lrp/patterns.py:37",
)
def functional_over_children(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(6, 3):
        dtype = next(model.parameters()).dtype
        out, relevance = x.to(dtype), x.to(dtype)
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                out = F.linear(out, layer.weight, layer.bias)
                relevance = F.linear(relevance.clamp(min=0), layer.weight.clamp(min=0)) + 1e-3
            else:
                out = layer(out)
        loss = F.mse_loss(out.float(), target) + 1e-3 * relevance.float().mean()
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


class _TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders: Any = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 4)])
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoders:
            x = torch.tanh(layer(x))
        for layer in reversed(self.encoders):
            x = F.linear(x, layer.weight.t())
        return x + self.bias


@idiom(
    "decodes with the transposed weights of the encoders",
    source="openai/sparse_autoencoder sparse_autoencoder/model.py:151",
)
def tied_autoencoder(run: Run) -> None:
    model = _TiedAutoencoder()
    optimizer = run.hold(model, adamw(model))
    for x, _ in vector_batches(6, 1):
        loss = F.mse_loss(model(x).float(), x)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


class _LossOfModel(nn.Module):
    """Holds the model as an attribute, beside nothing of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens).float()
        smooth = 1e-3 * self.model.get_submodule("head").weight.float().pow(2).mean()
        out: Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + smooth
        return out


@idiom(
    "an outer module computes the loss and holds the model",
    source="UKPLab/sentence-transformers sentence_transformers/cross_encoder/losses/CrossEntropyLoss.py:57",
)
def loss_module_around_model(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    criterion = _LossOfModel(model).train()
    for tokens, targets in token_batches():
        loss = criterion(tokens, targets)
        learn(optimizer, loss)
        run.log(loss, len(list(criterion.parameters())))
    run.log(criterion)


@idiom(
    "forward hooks read size and values of their module's weight",
    source="mit-han-lab/once-for-all ofa/utils/flops_counter.py:16",
)
def forward_hooks_read_weights(run: Run) -> None:
    model = TinyLm()
    noted: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        weight = module.get_parameter("weight")
        noted.append(weight.detach().float().norm() / output.detach().float().norm() * weight.size()[0])

    block: Any = model.blocks[1]
    early = block.up.register_forward_hook(note)
    optimizer = run.hold(model, adamw(model))
    late = model.head.register_forward_hook(note)
    for tokens, targets in token_batches():
        noted.clear()
        loss = token_loss(model, tokens, targets)
        run.log(loss, torch.stack(noted))
        learn(optimizer, loss)  # where units are recomputed, their hooks run again
    early.remove()
    late.remove()
    run.log(model)


@idiom(
    "a forward pre-hook, registered before the optimizer, scales inputs by its module's weight",
    source="pytorch/pytorch torch/nn/utils/prune.py:197",
)
def pre_hook_reads_weight(run: Run) -> None:
    model = TinyLm()

    def scale(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] / (1 + module.get_parameter("up.weight").norm()), *args[1:])

    for block in model.blocks:
        block.register_forward_pre_hook(scale)
    train_tokens(run, model)


@idiom("evaluates in inference mode between steps", source="karpathy/nanoGPT train.py:216")
def inference_mode_between_steps(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    held_out = list(token_batches(2, seed=9))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        model.eval()
        with torch.inference_mode():
            run.log(*(token_loss(model, *batch).item() for batch in held_out), model.head.weight.sum().item())
        with torch.no_grad():
            run.log(token_loss(model, *held_out[0]))
        model.train()
        run.log(loss)
    run.log(model)


@idiom(
    "penalizes the gradient at real inputs in a step of its own, every second time",
    source="rosinality/stylegan2-pytorch train.py:73",
)
def r1_penalty(run: Run) -> None:
    critic = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 1))
    optimizer = run.hold(critic, adamw(critic))
    for number, (real, fake) in enumerate(vector_batches(6, 6)):
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        learn(optimizer, loss)
        run.log(loss)
        if number % 2 == 0:
            real.requires_grad_(True)
            score = critic(real)
            (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            penalty = slope.float().pow(2).reshape(len(slope), -1).sum(1).mean()
            learn(optimizer, 5 * penalty + 0 * score[0, 0])
            run.log(penalty)
    run.log(critic)


@idiom(
    "estimates the largest eigenvalue of the Hessian between steps",
    source="amirgholami/PyHessian pyhessian/hessian.py:78",
    bf16=False,
)
def hessian_vector_products(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    params = list(model.parameters())
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        grads = torch.autograd.grad(token_loss(model, tokens, targets), params, create_graph=True)
        direction = [torch.randn(param.size()) for param in params]
        for _ in range(2):
            length = torch.sqrt(sum(((v * v).sum() for v in direction), torch.zeros(())))
            direction = [v / length for v in direction]
            product = torch.autograd.grad(grads, params, grad_outputs=direction, retain_graph=True)
            eigenvalue = sum(((h * v).sum() for h, v in zip(product, direction, strict=True)), torch.zeros(()))
            direction = [h.detach() for h in product]
        run.log(loss, eigenvalue)
    run.log(model)


@idiom(
    "adapts a dict of parameters in an inner loop and learns through it",
    source="dragen1860/MAML-Pytorch meta.py:87",
)
def inner_loop_by_functional_call(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        fast: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(2):
            logits = torch.func.functional_call(model, fast, (tokens[:2],))
            inner = F.cross_entropy(logits.float().flatten(0, 1), targets[:2].flatten())
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: param - 0.1 * grad for (name, param), grad in zip(fast.items(), grads, strict=True)}
        logits = torch.func.functional_call(model, fast, (tokens[2:],))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets[2:].flatten())
        learn(optimizer, loss)
        run.log(inner, loss)
    run.log(model)


@idiom(
    "computes gradients for each sample of a copy of the parameters",
    source="pytorch/pytorch torch/_functorch/functional_call.py:84",
    bf16=False,
)
def gradients_for_each_sample(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))

    def loss_of(params: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, params, (tokens.unsqueeze(0),))
        return F.cross_entropy(logits[0], targets)

    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(params, tokens, targets)
        run.log(loss, *(grad.var(0).sum() for grad in grads.values()))
    run.log(model)


@idiom(
    "constructs parameters from parameters, by nn.Parameter and by their type",
    source="huggingface/accelerate src/accelerate/utils/modeling.py:351",
)
def clones_of_parameters(run: Run) -> None:
    model: Any = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        copy = nn.Parameter(model.head.weight.clone())
        other = type(model.head.weight)(model.blocks[0].up.weight.detach() * 2)
        kept = nn.Parameter(model.norm.weight, requires_grad=False).sum()
        value = (copy.pow(2).sum() + other.pow(3).sum()).float()
        value.backward()
        assert copy.grad is not None
        assert other.grad is not None
        run.log(loss, copy.grad, other.grad.sum(), kept)
    run.log(model)


@idiom(
    "skips another block at each step and reports what got no gradient",
    source="huggingface/transformers src/transformers/models/wav2vec2/modeling_wav2vec2.py:691",
)
def parameters_without_gradient(run: Run) -> None:
    model = TinyLm()
    unused = nn.Linear(3, 3)
    model.add_module("unused", unused)
    optimizer = run.hold(model, adamw(model))
    for number, (tokens, targets) in enumerate(token_batches()):
        x = model.embedding(tokens)
        for index, block in enumerate(model.blocks):
            if index != number % 3:
                x = block(x)
        loss = F.cross_entropy(model.head(model.norm(x)).float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        run.log(sum(param.grad is None for param in model.parameters()))
        optimizer.step()
        run.log(loss)
    run.log(model)
