"""Small models of three kinds, and the batches they learn from: the same at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor, nn

from offload import linear_cross_entropy
from offload.demo.gpt import GPT, GPTConfig
from tests.support.experts import USES, WIDTH, Layer


class Mlp(nn.Module):
    """Odd sizes everywhere, a frozen layer, a parameter of one element, and one that gets a gradient in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 67)
        self.middle = nn.ModuleList(nn.Linear(67, 67) for _ in range(3))
        self.last = nn.Linear(67, 7, bias=False)
        self.gain = nn.Parameter(torch.ones(()))
        self.rare = nn.Parameter(torch.zeros(7))
        self.frozen = nn.Linear(67, 67).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.relu(self.first(x))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        x = self.last(x + self.frozen(x)) * self.gain
        return x + self.rare if self.calls % 3 == 0 else x


class Turn(nn.Module):
    """A block, one of whose parameters is not used every time."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.zeros(33))
        self.linear = nn.Linear(33, 33)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x * (1 + self.rare) if whole else x


class Adapted(nn.Module):
    """Frozen blocks, and so few trained parameters that they stay on the device where those stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 67).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(67, 67).requires_grad_(False) for _ in range(4))
        self.gains = nn.ParameterList(torch.ones(67) for _ in range(4))
        self.last = nn.Linear(67, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, gain in zip(self.blocks, self.gains, strict=True):
            x = x + torch.tanh(block(x)) * gain
        out: Tensor = self.last(x)
        return out


class Turns(nn.Module):
    """Blocks in which not every parameter gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 33)
        self.blocks = nn.ModuleList(Turn() for _ in range(4))
        self.last = nn.Linear(33, 7)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, (self.calls + number) % 3 == 0)
        out: Tensor = self.last(x)
        return out


class Times(nn.Module):
    """A weight, times what comes: of which the gradient is just that."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Sums(nn.Module):
    """Each gradient is what the input says, and the ranks' cancel each other: any other order of summing has other
    bits, which sums of a few ordinary gradients in bf16, exact in fp32 for the most part, do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Times(numel) for numel in (1000, 1, 333, 4097))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([block.weight.numel() for block in self.blocks])
        return torch.stack([block(part) for block, part in zip(self.blocks, parts, strict=True)])


class Words(nn.Module):
    """Predicts words by a head that is a unit of its own where units are chosen, by the loss without logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 33)
        self.blocks = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.head = nn.Linear(33, 61)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(words)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return linear_cross_entropy(h, self.head, labels, chunk=5, softcap=3.0)


class Routed(nn.Module):
    """Two layers of experts, and a large embedding. Tokens of the first eight words go to no expert.

    But all do where experts are `grouped`: torch has no gradients of a product without rows.

    Args:
        use: how experts are used, one of `USES` of tests/support/experts.py.
    """

    DROPPED, WORDS = 8, 64

    def __init__(self, use: str) -> None:
        super().__init__()
        self.least = 0 if use == "grouped" else self.DROPPED
        self.embed = nn.Embedding(self.WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(USES[use]) for _ in range(2))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        kept = (words >= self.least).nonzero().view(-1)
        for layer in self.layers:
            x = x.index_add(0, kept, layer(x[kept]))
        out: Tensor = self.head(x)
        return out

    @classmethod
    def draw(cls, number: int, generator: torch.Generator) -> Tensor:
        """The words of a micro-batch. Two ranks have in turn: all and dropped ones; one word and all; dropped ones."""
        ranges = {"all": (0, cls.WORDS), "dropped": (0, cls.DROPPED), "one": (cls.WORDS - 1, cls.WORDS)}
        turns = ("all", "dropped", "one", "all", "dropped", "dropped")
        return torch.randint(*ranges[turns[number % len(turns)]], (24,), generator=generator)


class Sparse(nn.Module):
    """Two layers of eight experts, one for each word. Most are idle in most steps.

    An expert's matrix has as many elements as squares of gradients are summed together.
    """

    WIDTH, EXPERTS = 256, 8

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.EXPERTS, self.WIDTH)
        self.layers = nn.ModuleList(SparseLayer(self.EXPERTS, self.WIDTH) for _ in range(2))
        self.head = nn.Linear(self.WIDTH, self.EXPERTS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, words)
        out: Tensor = self.head(x)
        return out

    @classmethod
    def draw(cls, number: int, generator: torch.Generator) -> Tensor:
        """The words of a micro-batch, which are the experts that it uses: at first all, then one."""
        chosen = (0, 0, 1, 0, 0, 1, 5, 0, 1, 1, 6, 6)[number % 12]
        return torch.randint(cls.EXPERTS, (24,), generator=generator) if number < 4 else torch.full((24,), chosen)


class SparseLayer(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        return x + torch.tanh(torch.bmm(self.experts[expert], x.unsqueeze(-1)).squeeze(-1))


class ConvNet(nn.Module):
    """Convolutions, one of them with channels-last weights, and norms that stay fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 13, 3, padding=1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(13, 13, 3, padding=1), nn.GroupNorm(1, 13), nn.ReLU()) for _ in range(2))
        )
        self.stem.to(memory_format=torch.channels_last)
        self.head = nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def build(kind: str) -> nn.Module:
    torch.manual_seed(7)
    if kind == "gpt":
        return GPT(GPTConfig(layers=3, heads=2, width=32, context=16))
    if kind in USES:
        return Routed(kind)
    return {
        "mlp": Mlp,
        "conv": ConvNet,
        "sums": Sums,
        "turns": Turns,
        "adapted": Adapted,
        "words": Words,
        "sparse": Sparse,
    }[kind]()


KINDS = ("gpt", "mlp", "conv")


def keep_fp32(kind: str) -> tuple[type[nn.Module], ...]:
    return (nn.GroupNorm,) if kind == "conv" else ()


def losses(kind: str, model: nn.Module, device: str = "cpu") -> Iterator[Callable[[], Tensor]]:
    """Endless micro-batches: call one to run forward and get its loss."""
    generator, numbers = torch.Generator().manual_seed(11), count()

    def draw() -> tuple[Tensor, Tensor]:
        if kind == "gpt":
            tokens = torch.randint(256, (2, 17), generator=generator)
            return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
        if kind == "words":
            words = torch.randint(61, (2, 9), generator=generator)
            return words[:, :-1].contiguous().to(device), words[:, 1:].contiguous().to(device)
        if kind in USES:
            words = Routed.draw(next(numbers), generator).to(device)
            return words, words % 7
        if kind == "sparse":
            words = Sparse.draw(next(numbers), generator)
            return words, words
        if kind == "sums":
            which = torch.randint(4, (5431,), generator=generator)
            return torch.tensor([1e8, -1e8, 1.0, 1 / 3])[which].to(device), which
        shape = (6, 13) if kind in ("mlp", "turns", "adapted") else (3, 3, 9, 9)
        return torch.randn(shape, generator=generator).to(device), torch.randint(7, shape[:1], generator=generator).to(
            device
        )

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        if kind == "gpt":
            found: Tensor = model(inputs, targets)[1]
            return found
        if kind == "words":
            of_words: Tensor = model(inputs, targets)
            return of_words
        if kind == "sums":
            return model(inputs).float().sum()
        return nn.functional.cross_entropy(model(inputs).float(), targets)

    while True:
        inputs, targets = draw()
        yield lambda inputs=inputs, targets=targets: loss(inputs, targets)


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Two param groups, as is usual: matrices decay, the rest does not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]
