"""Modules whose parameters are computed, shared, listed, recurrent, checkpointed, copied or traced."""

from __future__ import annotations

import copy
import warnings
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.oracle.harness import STREAMED, WRITTEN_AGAIN, Run, idiom
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


def train_vectors(run: Run, model: nn.Module, inputs: int = 6, outputs: int = 3) -> None:
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(inputs, outputs):
        loss = F.mse_loss(model(x).float(), target)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


def old_norm(kind: Any, module: nn.Module) -> Any:
    """torch's functions that compute a weight in a forward pre-hook are deprecated, and much used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(module)


class _Waves(nn.Module):
    """Normalized convolutions, some in a ModuleList and one in the root."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first = kind(nn.Conv1d(1, 4, 3, padding=1))
        self.convolutions = nn.ModuleList(kind(nn.Conv1d(4, 4, 3, padding=size, dilation=size)) for size in (1, 3))
        self.last = nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.unsqueeze(1))
        for convolution in self.convolutions:
            x = x + convolution(F.leaky_relu(x, 0.1))
        out: Tensor = self.last(x).squeeze(1)
        return out


@idiom("weight_norm in forward pre-hooks, removed from a copy for inference", source="jik876/hifi-gan models.py:16")
def weight_norm_by_hook(run: Run) -> None:
    def kind(module: nn.Module) -> Any:
        return old_norm(nn.utils.weight_norm, module)

    model = _Waves(kind)
    train_vectors(run, model, 8, 8)
    inference = _Waves(kind)
    inference.load_state_dict(model.state_dict())
    for module in (inference.first, *inference.convolutions):
        nn.utils.remove_weight_norm(module)
    x = torch.randn(2, 8)
    with torch.no_grad():
        run.log(inference(x), model(x.to(model.last.weight.dtype)))
    run.log(inference)


@idiom(
    "the last layer has weight_norm with a frozen magnitude",
    source="facebookresearch/dino vision_transformer.py:276",
)
def weight_norm_with_frozen_magnitude(run: Run) -> None:
    model = TinyLm(2)
    model.head = old_norm(nn.utils.weight_norm, nn.Linear(WIDTH, VOCABULARY, bias=False))
    model.head.get_parameter("weight_g").data.fill_(1)
    model.head.get_parameter("weight_g").requires_grad = False
    train_tokens(run, model)


@idiom("spectral_norm in forward pre-hooks", source="jik876/hifi-gan models.py:132", bf16=False)
def spectral_norm_by_hook(run: Run) -> None:
    train_vectors(run, _Waves(lambda module: old_norm(nn.utils.spectral_norm, module)), 8, 8)


@idiom(
    "weight_norm as a parametrization",
    source="huggingface/transformers src/transformers/models/wav2vec2/modeling_wav2vec2.py:343",
)
def weight_norm_parametrized(run: Run) -> None:
    train_vectors(run, _Waves(parametrizations.weight_norm), 8, 8)


@idiom(
    "spectral_norm as a parametrization",
    source="pytorch/pytorch torch/nn/utils/parametrizations.py:535",
    bf16=False,
)
def spectral_norm_parametrized(run: Run) -> None:
    train_vectors(run, _Waves(parametrizations.spectral_norm), 8, 8)


@idiom(
    "orthogonal matrices as a parametrization",
    source="pytorch/pytorch torch/nn/utils/parametrizations.py:193",
    bf16=False,
)
def orthogonal_parametrized(run: Run) -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))
    train_vectors(run, model)
    first: Any = model[0]
    run.log(first.weight @ first.weight.T)


class _MaxNorm(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.renorm(p=2, dim=0, maxnorm=0.5)


@idiom(
    "rows of bounded norm as a parametrization of its own",
    source="braindecode/braindecode braindecode/models/eegitnet.py:235",
)
def own_parametrization(run: Run) -> None:
    model = TinyLm()
    for block in model.blocks:
        parametrize.register_parametrization(block.get_submodule("up"), "weight", _MaxNorm())
    train_tokens(run, model)
    up: Any = model.blocks[0].get_submodule("up")
    run.log(up.weight)


@idiom(
    "computes a parametrized weight once for two forwards",
    source="pytorch/pytorch torch/nn/utils/parametrize.py:34",
)
def cached_parametrization(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    parametrize.register_parametrization(model[0], "weight", _MaxNorm())
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(6, 6):
        with parametrize.cached():
            loss = F.mse_loss(model(model(x)).float(), target)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom(
    "registers parametrizations on a copy while training goes on",
    source="pytorch/pytorch torch/nn/utils/parametrize.py:450",
)
def copy_is_parametrized(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        other = copy.deepcopy(model)
        parametrize.register_parametrization(other.head, "weight", _MaxNorm())
        for block in other.blocks:
            parametrize.register_parametrization(block.get_submodule("down"), "weight", _MaxNorm())
        bounded = token_loss(other, tokens, targets)
        bounded.backward()
        parametrize.remove_parametrizations(other.head, "weight")
        run.log(loss, bounded, other.head.weight, other.norm.get_parameter("weight").grad)
    run.log(model)


@idiom(
    "masks pruned weights in forward pre-hooks",
    source="pytorch/pytorch torch/nn/utils/prune.py:194",
)
def pruned_by_masks(run: Run) -> None:
    model = TinyLm()
    for block in model.blocks:
        prune.l1_unstructured(block.get_submodule("up"), name="weight", amount=0.3)
    prune.random_unstructured(model.head, name="weight", amount=0.2)
    train_tokens(run, model)


class _StandardizedConv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-5).reshape_as(self.weight)
        return F.conv1d(x, weight, self.bias, padding=1)


@idiom(
    "convolutions standardize their weight",
    source="huggingface/pytorch-image-models timm/layers/std_conv.py:57",
)
def weight_standardization(run: Run) -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        _StandardizedConv(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        _StandardizedConv(4, 4, 3),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    train_vectors(run, model, 8, 3)


class _Modulated(nn.Module):
    """A weight for each sample, from a style; scaled at run time and normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8, 8))
        self.style = nn.Linear(8, 8)
        self.scale = 8**-0.5

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scale * self.weight * (self.style(x) + 1).unsqueeze(1)
        weight = weight * torch.rsqrt(weight.pow(2).sum(2, keepdim=True) + 1e-4)
        return F.leaky_relu(torch.bmm(weight, x.unsqueeze(2)).squeeze(2), 0.2)


@idiom("modulates a weight for each sample", source="rosinality/stylegan2-pytorch model.py:259")
def modulated_weights(run: Run) -> None:
    train_vectors(run, nn.Sequential(nn.Linear(6, 8), _Modulated(), _Modulated(), nn.Linear(8, 3)))


class _Margin(nn.Module):
    """Cosines of features and of a weight's rows, with a margin at the target."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, WIDTH))
        self.weight = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight))
        return 8 * (cosine - 0.3 * F.one_hot(labels, 4))


@idiom("classifies by cosines with its weight's rows", source="ronghuaiyang/arcface-pytorch models/metrics.py:37")
def cosine_classifier(run: Run) -> None:
    model = _Margin()
    optimizer = run.hold(model, adamw(model))
    for x, _ in vector_batches(6, 1):
        labels = torch.randint(4, (len(x),))
        loss = F.cross_entropy(model(x, labels).float(), labels)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


@idiom("ties embedding and head", source="karpathy/nanoGPT model.py:138")
def tied_embedding(run: Run) -> None:
    train_tokens(run, TinyLm(tied=True))


class _TiedAcross(nn.Module):
    """One matrix in the root, in an encoder block and in a decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block())
        self.decoder = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block())
        for part in (self.encoder, self.decoder):
            part[0].weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.encoder(tokens).mean(1, keepdim=True)
        return F.linear(self.decoder(tokens) + memory, self.shared.weight)


@idiom(
    "ties one matrix over encoder, decoder and output",
    source="huggingface/transformers src/transformers/models/bart/modeling_bart.py:682",
)
def tied_across_units(run: Run) -> None:
    train_tokens(run, _TiedAcross())


class _Repeated(TinyLm):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number in range(5):
            x = self.blocks[number % 2](x)
        out: Tensor = self.head(self.norm(x))
        return out


@idiom(
    "applies the same blocks several times",
    source="huggingface/transformers src/transformers/models/albert/modeling_albert.py:278",
)
def blocks_repeated(run: Run) -> None:
    train_tokens(run, _Repeated(2))


@idiom(
    "encodes two views before one backward",
    source="UKPLab/sentence-transformers sentence_transformers/losses/CoSENTLoss.py:82",
)
def one_encoder_two_views(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), Block(12), nn.Linear(12, 4))
    optimizer = run.hold(model, adamw(model))
    for x, noise in vector_batches(6, 6):
        one, other = F.normalize(model(x).float()), F.normalize(model(x + 0.1 * noise).float())
        loss = F.cross_entropy(one @ other.t() / 0.1, torch.arange(len(x)))
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


class _Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.decoder = nn.Linear(WIDTH * (2 if self.rnn.bidirectional else 1), VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        states, _ = self.rnn(self.encoder(tokens))
        out: Tensor = self.decoder(states)
        return out


@idiom("an LSTM of two layers, flattened at each forward", source="speechbrain/speechbrain speechbrain/nnet/RNN.py:168")
def lstm_language_model(run: Run) -> None:
    train_tokens(run, _Recurrent(nn.LSTM, num_layers=2))


@idiom("a GRU in both directions, its class chosen by name", source="pytorch/examples word_language_model/model.py:15")
def gru_in_both_directions(run: Run) -> None:
    train_tokens(run, _Recurrent(getattr(nn, "GRU"), bidirectional=True))  # noqa: B009


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(1, 6), nn.LSTMCell(6, 6)])
        self.linear = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        states = [(x.new_zeros(len(x), 6), x.new_zeros(len(x), 6)) for _ in self.cells]
        outputs = []
        for step in x.split(1, dim=1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(step, states[number])
                step = states[number][0]
            outputs.append(self.linear(step))
        return torch.cat(outputs, dim=1)


@idiom(
    "calls LSTM cells at each time step",
    source="pytorch/examples time_sequence_prediction/train.py:14",
)
def lstm_cells_over_time(run: Run) -> None:
    train_vectors(run, _Cells(), 5, 5)


class _WeightDrop(nn.Module):
    """Drops entries of a recurrent weight, which becomes an ordinary attribute of the LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.module = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        weight: Any = self.module.weight_hh_l0
        del self.module._parameters["weight_hh_l0"]
        self.module.register_parameter("weight_hh_l0_raw", nn.Parameter(weight.detach().clone()))

    def forward(self, tokens: Tensor) -> Tensor:
        raw = self.module.get_parameter("weight_hh_l0_raw")
        self.module.weight_hh_l0 = F.dropout(raw, p=0.3, training=self.training)
        out: Tensor = self.decoder(self.module(self.encoder(tokens))[0])
        return out


@idiom("sets an LSTM's weight to a computed tensor", source="salesforce/awd-lstm-lm weight_drop.py:43")
def dropped_recurrent_weight(run: Run) -> None:
    train_tokens(run, _WeightDrop())


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(tokens) + self.position))
        return out


@idiom(
    "torch's own transformer, with packed projections, and its fast path in evaluations",
    source="pytorch/pytorch torch/nn/modules/transformer.py:917",
)
def transformer_with_fast_path(run: Run) -> None:
    model = _Attention()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        model.eval()
        with torch.no_grad():
            run.log(loss, token_loss(model, tokens, targets))
        model.train()
    run.log(model)


class _PaddedAttention(_Attention):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.use_nested_tensor = True

    def forward(self, tokens: Tensor) -> Tensor:
        padding = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        padding[::2, LENGTH // 2 :] = True
        out = self.encoder(self.embedding(tokens) + self.position, src_key_padding_mask=padding)
        logits: Tensor = self.head(out)
        return logits


@idiom(
    "torch's own transformer evaluates padded batches, whose padding becomes zeros then",
    source="pytorch/pytorch torch/nn/modules/transformer.py:515",
)
def transformer_with_padding(run: Run) -> None:
    model = _PaddedAttention()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        model.eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors are a prototype
            run.log(loss, model(tokens))
        model.train()
    run.log(model)


class _FunctionalAttention(nn.Module):
    """Projections are children whose weights go to the functional form; the children are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        out, _ = F.multi_head_attention_forward(
            query=x,
            key=x,
            value=x,
            embed_dim_to_check=WIDTH,
            num_heads=2,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            training=self.training,
            need_weights=False,
        )
        return out.transpose(0, 1)


@idiom("gives its children's weights to functional attention", source="openai/CLIP clip/model.py:76")
def functional_attention(run: Run) -> None:
    train_tokens(
        run,
        nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH),
            _FunctionalAttention(),
            _FunctionalAttention(),
            nn.Linear(WIDTH, VOCABULARY),
        ),
        eps=1e-4,
    )


class _PartialBias(nn.Module):
    """Queries and values have a bias, keys have none."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("k_bias", torch.zeros(WIDTH), persistent=False)
        self.v_bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, self.get_buffer("k_bias"), self.v_bias])
        q, k, v = F.linear(x, weight=self.qkv.weight, bias=bias).chunk(3, dim=-1)
        return x + (q @ k.transpose(1, 2)).softmax(-1) @ v


@idiom(
    "calls F.linear with a child's weight and a bias put together",
    source="huggingface/pytorch-image-models timm/models/beit.py:218",
    bf16=False,
)
def bias_put_together(run: Run) -> None:
    model = TinyLm(2)
    model.blocks.insert(1, _PartialBias())
    train_tokens(run, model)


class _Mixed(nn.Module):
    """Scalars in a ParameterList mix the layers' outputs, adapters are in a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scalars = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(3)])
        self.down = nn.ParameterDict({"default": nn.Parameter(torch.randn(WIDTH, 2) * 0.2)})
        self.up = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, VOCABULARY))})
        self.head = nn.ModuleDict({"default": nn.Linear(WIDTH, VOCABULARY), "other": nn.Linear(WIDTH, VOCABULARY)})

    def forward(self, tokens: Tensor) -> Tensor:
        x, outputs = self.embedding(tokens), []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        weights = F.softmax(torch.cat(list(self.scalars)), dim=0).split(1)
        x = sum(weight * output for weight, output in zip(weights, outputs, strict=True))
        out: Tensor = self.head["default"](x) + x @ self.down["default"] @ self.up["default"]
        return out


@idiom("keeps parameters in lists and dicts of parameters", source="allenai/allennlp allennlp/modules/scalar_mix.py:38")
def parameter_lists_and_dicts(run: Run) -> None:
    train_tokens(run, _Mixed())


class _Checkpointed(TinyLm):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:

            def run_block(x: Tensor, block: nn.Module = block) -> Tensor:
                out: Tensor = self.dropout(block(x))
                return out

            x = torch.utils.checkpoint.checkpoint(run_block, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.head(self.norm(x))
        return out


@idiom(
    "checkpoints blocks with dropout, without re-entering autograd",
    source="huggingface/transformers src/transformers/modeling_utils.py:3149",
)
def checkpointed_blocks(run: Run) -> None:
    train_tokens(run, _Checkpointed(use_reentrant=False))


@idiom(
    "checkpoints blocks with dropout, re-entering autograd",
    source="microsoft/Swin-Transformer models/swin_transformer.py:418",
)
def checkpointed_blocks_reentrant(run: Run) -> None:
    train_tokens(run, _Checkpointed(use_reentrant=True))


@idiom(
    "checkpoints segments of a Sequential",
    source="pytorch/pytorch torch/utils/checkpoint.py:542",
)
def checkpointed_segments(run: Run) -> None:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3))
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(6, 3):
        x = x.to(model[-1].weight.dtype)
        out = torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False)
        loss = F.mse_loss(out.float(), target)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


class _Hyper(nn.Module):
    """One small network makes the weights of all layers, each from a vector of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.hyper = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 36))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for vector in self.vectors:
            x = torch.tanh(F.linear(x, self.hyper(vector).view(6, 6)))
        out: Tensor = self.last(x)
        return out


@idiom("a network makes the weights of layers", source="g1910/HyperNetworks primary_net.py:75")
def hypernetwork(run: Run) -> None:
    train_vectors(run, _Hyper())


class _Noisy(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(outputs, inputs).uniform_(-0.4, 0.4))
        self.sigma = nn.Parameter(torch.full((outputs, inputs), 0.1))
        self.register_buffer("epsilon", torch.empty(outputs, inputs))
        self.reset_noise()

    def reset_noise(self) -> None:
        device = self.mu.device
        outer, inner = torch.randn(self.mu.shape[0], device=device), torch.randn(self.mu.shape[1], device=device)
        self.get_buffer("epsilon").copy_(outer.ger(inner))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mu + self.sigma * self.get_buffer("epsilon") if self.training else self.mu)


@idiom("learns the scale of noise on its weights", source="Kaixhin/Rainbow model.py:44", bf16=False)
def noisy_layers(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), _Noisy(12, 12), nn.ReLU(), _Noisy(12, 3))
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(6, 3):
        for module in model.modules():
            if isinstance(module, _Noisy):
                module.reset_noise()
        loss = F.mse_loss(model(x).float(), target)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


class _Elastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)
        self.width = 12

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.linear(x, self.up.weight[: self.width], self.up.bias[: self.width]))
        return F.linear(x, self.down.weight[:, : self.width], self.down.bias)


@idiom(
    "trains slices of weights, of another width at each step",
    source="mit-han-lab/once-for-all ofa/imagenet_classification/elastic_nn/modules/dynamic_op.py:145",
)
def slices_of_weights(run: Run) -> None:
    model = _Elastic()
    optimizer = run.hold(model, adamw(model))
    for number, (x, target) in enumerate(vector_batches(6, 3)):
        model.width = (12, 4, 8)[number % 3]
        loss = F.mse_loss(model(x).float(), target)
        learn(optimizer, loss)
        run.log(loss)
    run.log(model)


class _Experts(nn.Module):
    """All experts in two parameters of three dimensions; those without tokens are not touched."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(4, WIDTH))
        self.up = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = F.linear(flat, self.router).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            index = (chosen == expert).nonzero().squeeze(1)
            gate, up = F.linear(flat[index], self.up[expert]).chunk(2, dim=-1)
            value = F.linear(F.silu(gate) * up, self.down[expert]) * weights[index, None]
            out.index_add_(0, index, value)
        return x + out.view_as(x)


@idiom(
    "indexes experts in a parameter of three dimensions",
    source="huggingface/transformers src/transformers/models/mixtral/modeling_mixtral.py:86",
)
def experts_in_one_parameter(run: Run) -> None:
    model = TinyLm(2)
    model.blocks.append(_Experts())
    train_tokens(run, model)


class _Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        self.codebook = nn.Embedding(8, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 6))
        self.codebook.weight.data.uniform_(-1 / 8, 1 / 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        book = self.codebook.weight
        far = z.pow(2).sum(1, keepdim=True) + torch.sum(book**2, dim=1) - 2 * torch.matmul(z, book.t())
        code = self.codebook(far.argmin(1))
        apart = F.mse_loss(code.detach(), z) * 0.25 + F.mse_loss(code, z.detach())
        return self.decoder(z + (code - z).detach()), apart


@idiom(
    "measures distances to the weight of an embedding, and looks up in it",
    source="CompVis/taming-transformers taming/modules/vqvae/quantize.py:50",
    bf16=False,
)
def vector_quantizer(run: Run) -> None:
    model = _Quantizer()
    optimizer = run.hold(model, adamw(model))
    for x, _ in vector_batches(6, 1):
        out, apart = model(x)
        loss = F.mse_loss(out, x) + apart
        learn(optimizer, loss)
        run.log(loss, apart)
    run.log(model)


@idiom(
    "an embedding bounds the norms of the rows it looks up, in place",
    source="pytorch/pytorch torch/nn/functional.py:2614",
    refused={"own units, activations on nvme": WRITTEN_AGAIN},
)
def embedding_with_max_norm(run: Run) -> None:
    model = TinyLm(2)
    model.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0, padding_idx=3)
    train_tokens(run, model)


class _OwnLinear(torch.autograd.Function):
    """A linear layer with a backward of its own, which keeps input and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return F.linear(grad, weight.t()), flat.t() @ x.flatten(0, -2), flat.sum(0)


class _OwnLm(TinyLm):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            own: Any = _OwnLinear.apply
            x = x + own(x, block.get_parameter("down.weight").t(), block.get_parameter("up.bias"))[..., :WIDTH]
        out: Tensor = self.head(self.norm(x))
        return out


@idiom(
    "gives weights to an autograd function of its own",
    source="fhvilshoj/TorchLRP lrp/functional/linear.py:9",
)
def own_autograd_function(run: Run) -> None:
    train_tokens(run, _OwnLm(2))


class _Positions(nn.Module):
    """Fixed positions are a parameter that asks for no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.arange(LENGTH)[:, None] / 10 ** torch.linspace(0, 2, WIDTH)
        self.positions = nn.Parameter(angles.sin(), requires_grad=False)
        self.mask_token = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mask", torch.arange(LENGTH) % 3 == 0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.where(self.get_buffer("mask")[:, None], self.mask_token, self.embedding(tokens)) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@idiom(
    "fixed positions are a parameter without gradient",
    source="huggingface/transformers src/transformers/models/vit_mae/modeling_vit_mae.py:196",
)
def fixed_positions(run: Run) -> None:
    train_tokens(run, _Positions())


@idiom(
    "the tails of an adaptive softmax, by its loss and by log_prob",
    source="pytorch/pytorch torch/nn/modules/adaptive.py:302",
    bf16=False,
)
def adaptive_softmax(run: Run) -> None:
    body = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block())
    softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, cutoffs=[5, 11], div_value=2.0)
    model = nn.ModuleDict({"body": body, "softmax": softmax})
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        hidden = body(tokens).flatten(0, 1)
        loss = softmax(hidden, targets.flatten()).loss
        learn(optimizer, loss)
        with torch.no_grad():
            run.log(loss, softmax.log_prob(hidden[:3].detach()), softmax.predict(hidden[:3].detach()))
    run.log(model)


@idiom(
    "a model of batch normalization, evaluated between steps", source="pytorch/examples mnist/main.py:54", bf16=False
)
def batch_normalization(run: Run) -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU()),
        nn.Sequential(nn.Linear(12, 12, bias=False), nn.BatchNorm1d(12, momentum=None), nn.ReLU()),
        nn.Linear(12, 3),
    )
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    for x, target in vector_batches(6, 3):
        model.train()
        loss = F.mse_loss(model(x), target)
        learn(optimizer, loss)
        model.eval()
        with torch.no_grad():
            run.log(loss, F.mse_loss(model(x), target))
    run.log(model)


@idiom(
    "fuses convolution and batch normalization into a new module for an evaluation",
    source="ultralytics/yolov5 utils/torch_utils.py:247",
    bf16=False,
)
def fused_for_evaluation(run: Run) -> None:
    conv, norm = nn.Conv1d(1, 4, 3, bias=False), nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Unflatten(1, (1, 8)), conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    optimizer = run.hold(model, adamw(model))
    for x, target in vector_batches(8, 3):
        loss = F.mse_loss(model(x), target)
        learn(optimizer, loss)
        model.eval()
        fused = nn.Conv1d(1, 4, 3).requires_grad_(False)
        scale = torch.diag(norm.weight.div(torch.sqrt(norm.eps + norm.get_buffer("running_var")))).detach()
        fused.weight.copy_(torch.mm(scale, conv.weight.clone().view(4, -1)).view(fused.weight.shape).detach())
        shift = norm.bias - norm.weight * norm.get_buffer("running_mean") / torch.sqrt(
            norm.get_buffer("running_var") + norm.eps
        )
        assert fused.bias is not None
        fused.bias.copy_(shift.detach())
        again = nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
        run.log(loss, fused(x.unsqueeze(1)), again(x.unsqueeze(1)), model(x))
        model.train()
    run.log(model)


@idiom(
    "evaluates an ensemble of snapshots by vmap",
    source="pytorch/pytorch torch/_functorch/functional_call.py:164",
    bf16=False,
)
def ensemble_of_snapshots(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    snapshots: list[nn.Module] = []
    skeleton = copy.deepcopy(model).to("meta")
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        snapshots.append(copy.deepcopy(model))
    params, buffers = torch.func.stack_module_state(snapshots)

    def one(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(skeleton, (params, buffers), (tokens,))
        return out

    run.log(model, torch.func.vmap(one)(params, buffers))


@idiom(
    "stacks the weights of members that train in one model",
    source="pytorch/pytorch torch/_functorch/functional_call.py:190",
    bf16=False,
)
def stacked_members(run: Run) -> None:
    members = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(3))
    optimizer = run.hold(members, adamw(members))
    skeleton = copy.deepcopy(members[0])
    for x, target in vector_batches(6, 3):
        loss = torch.stack([F.mse_loss(member(x), target) for member in members]).sum()
        learn(optimizer, loss)
        params, _ = torch.func.stack_module_state(list(members))

        def one(params: dict[str, Tensor], x: Tensor = x) -> Tensor:
            out: Tensor = torch.func.functional_call(skeleton, params, (x,))
            return out

        run.log(loss, torch.func.vmap(one)(params))
    run.log(members)


@idiom(
    "trains a deep copy with an optimizer of its own between steps",
    source="facebookresearch/DomainBed domainbed/algorithms.py:895",
)
def deep_copy_trained(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for tokens, targets in token_batches():
        inner = copy.deepcopy(model)
        by_inner = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            near = token_loss(inner, tokens, targets)
            learn(by_inner, near)
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        with torch.no_grad():
            for param, other in zip(model.parameters(), inner.parameters(), strict=True):
                param.add_(0.1 * (other - param))
        run.log(loss, near, inner.head.weight)
    run.log(model)


@idiom(
    "traces the model after a step and runs the trace",
    source="ultralytics/yolov5 export.py:269",
    bf16=False,
    refused=dict.fromkeys(STREAMED, "a trace keeps the parameters that it met, where nothing fetches them"),
)
def traced_after_a_step(run: Run) -> None:
    model = TinyLm(2)
    optimizer = run.hold(model, adamw(model))
    for number, (tokens, targets) in enumerate(token_batches()):
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
        if number in (2, 5):
            model.eval()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trace = torch.jit.trace(model, tokens, strict=False, check_trace=False)
                run.log(trace(tokens), model(tokens))
            model.train()
    run.log(model)


@idiom(
    "replaces forward of the model and of a block by methods around them",
    source="huggingface/accelerate src/accelerate/accelerator.py:1828",
)
def forward_replaced(run: Run) -> None:
    model: Any = TinyLm()
    optimizer = run.hold(model, adamw(model))
    plain = model.forward
    inner = model.blocks[1].forward

    def whole(self: Any, tokens: Tensor) -> Tensor:
        out: Tensor = plain(tokens).float() + self.head.weight.float().mean()
        return out

    def part(self: Any, x: Tensor) -> Tensor:
        out: Tensor = inner(x) * self.norm.weight
        return out

    model.forward = MethodType(whole, model)
    model.blocks[1].forward = MethodType(part, model.blocks[1])
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        learn(optimizer, loss)
        run.log(loss)
    del model.forward
    run.log(model)
    run.log(model(tokens))


class _Wrapped(nn.Module):
    """Calls forward of what it wraps, so that hooks of that module do not run, those of its children do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.model.forward(tokens)
        return out


@idiom("calls forward of the model itself", source="huggingface/peft src/peft/tuners/adalora/model.py:230")
def forward_called_directly(run: Run) -> None:
    model = TinyLm(tied=True)
    optimizer = run.hold(model, adamw(model))
    wrapped = _Wrapped(model)
    for tokens, targets in token_batches():
        loss = token_loss(wrapped, tokens, targets)
        learn(optimizer, loss)
        with torch.no_grad():
            run.log(loss, model.blocks[1].forward(model.embedding.forward(tokens)))
    run.log(model)


@idiom(
    "moves the model to where it is, in the dtype it has",
    source="huggingface/accelerate src/accelerate/accelerator.py:1875",
    bf16=False,
)
def moved_to_where_it_is(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, adamw(model))
    device = next(model.parameters()).device
    model.to(device)
    for tokens, targets in token_batches():
        model.train().to(device=device, dtype=torch.float32)
        loss = token_loss(model, tokens.to(device), targets.to(device))
        learn(optimizer, loss)
        model.float().to(torch.float32)
        model.head.to("cpu")
        moved = model.head.weight.cpu().to(device).float() + model.blocks[0].get_parameter("norm.weight").to(device)
        run.log(loss, moved)
    model.cpu()
    run.log(model)


@idiom(
    "exports the model after training and runs what was exported",
    source="huggingface/pytorch-image-models tests/test_models.py:873",
    bf16=False,
)
def exported_after_training(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    train_vectors(run, model)
    model.eval()
    x = torch.randn(2, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, (x,))
    with torch.no_grad():
        run.log(exported.module()(x), model(x))
    run.log(exported.state_dict)
