"""A byte-level GPT: the model of `offload train`, and an ordinary `nn.Module` in every respect.

Shapes: B sequences, T tokens a sequence, W width, V = 256 (a token is a byte, so there is no tokenizer).
Activations have the parameters' dtype: fp32 as built, bf16 once `OffloadZero` has taken the model.
The loss is computed in fp32 whatever that dtype is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import ConfigError

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Args:
        layers: the number of blocks.
        width: the width of the model, a multiple of `heads`.
        heads: the number of attention heads.
        context: the length of the longest sequence, in tokens.
        tied_head: whether the output matrix is the embedding. By default it is not: with a vocabulary of 256 bytes both
            are small, so tying saves nothing, and the untied model learns faster.

    Raises:
        ConfigError: a size is below 1, or `width` is not a multiple of `heads`.
    """

    layers: int
    width: int
    heads: int
    context: int = 1024
    tied_head: bool = False

    def __post_init__(self) -> None:
        for option in ("layers", "width", "heads", "context"):
            if getattr(self, option) < 1:
                raise ConfigError(f"{option}={getattr(self, option)}: a GPT needs at least 1")
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} is not a multiple of heads={self.heads}")


PRESETS = {
    "1m": GPTConfig(layers=4, width=128, heads=4),
    "5m": GPTConfig(layers=6, width=256, heads=4),
    "20m": GPTConfig(layers=6, width=512, heads=8),
    "125m": GPTConfig(layers=10, width=1024, heads=16),
    "350m": GPTConfig(layers=28, width=1024, heads=16),
    "1b": GPTConfig(layers=20, width=2048, heads=16),
    "2b": GPTConfig(layers=25, width=2560, heads=20),
}
"""Sizes by name; the name is the number of parameters, within 3 %."""


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream: (B, T, W) -> (B, T, W)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        hidden = F.gelu(self.expand(self.norm_mlp(x)))
        return x + self.contract(hidden)  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention, (B, T, W) -> (B, T, W)."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, T, W / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


def initial_values(config: GPTConfig, seed: int) -> Callable[[str, Tensor], None]:
    """Makes a function that fills a parameter, given its name, with GPT-2's initial values.

    Matrices are drawn from a normal distribution with mean 0 and standard deviation 0.02, or 0.02 / sqrt(2 layers)
    where they add to the residual stream. Each has a random generator of its own, so a model that is made in parts has
    the bits of one that is made whole.

    Args:
        config: sizes.
        seed: the same seed gives the same bits.
    """
    residual = 0.02 / math.sqrt(2 * config.layers)

    @torch.no_grad()
    def fill(name: str, parameter: Tensor) -> None:
        if parameter.ndim == 2:
            generator = torch.Generator().manual_seed(int(xxhash.xxh64_intdigest(name.encode(), seed) >> 1))
            adds = name.endswith(("project.weight", "contract.weight"))
            parameter.normal_(0.0, residual if adds else 0.02, generator=generator)
        else:  # LayerNorm
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)

    return fill


class GPT(nn.Module):
    """Pre-norm GPT over bytes with learned positions.

    Args:
        config: sizes.
        seed: the seed of the initial values. The same seed gives the same bits; torch's global generator is neither
            read nor moved.
        device: "cpu", or "meta" for shapes without memory.
        checkpoint_activations: whether training keeps only what enters each block, (B, T, W), and runs the block once
            more in its backward. That is about 1/16 of the activations, and the bits are the same.
    """

    def __init__(
        self, config: GPTConfig, seed: int = 0, device: str = "cpu", *, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        # On the meta device first: torch's own initial values would cost time and global random numbers.
        with torch.device("meta"):
            self.embed = nn.Embedding(VOCABULARY, config.width)
            self.positions = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.to_empty(device=device)
        if config.tied_head:
            self.head.weight = self.embed.weight
        if device != "meta":
            fill = initial_values(config, seed)
            for name, parameter in self.named_parameters():
                fill(name, parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Predicts the byte after each position.

        Args:
            tokens: (B, T) int64 in 0..255, T at most `config.context`.
            targets: (B, T) int64, the byte that follows each token, or None.

        Returns:
            The logits, (B, T, 256) in the parameters' dtype, and the mean cross entropy in nats a byte, a 0-dim fp32
            tensor, or None without targets.

        Raises:
            ConfigError: T is larger than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ConfigError(f"{length} tokens in a sequence: this model's context is {self.config.context}")
        x = self.embed(tokens) + self.positions(torch.arange(length, device=tokens.device))
        recomputes = self.checkpoint_activations and torch.is_grad_enabled()
        for block in self.blocks:
            # A block draws no random numbers, so there are none to draw again.
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if recomputes else block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        count: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Samples `count` bytes after a prompt, one at a time, with the last `context` bytes in view.

        Args:
            prompt: (T,) int64, at least one token.
            count: how many bytes to sample.
            temperature: the divisor of the logits; 0 takes the likeliest byte each time.
            generator: a CPU generator, from which all bytes are drawn, whatever the device; None: torch's global one.

        Returns:
            (T + count,) int64 on the prompt's device.
        """
        tokens = prompt
        for _ in range(count):
            logits, _ = self(tokens[-self.config.context :].unsqueeze(0))
            last = logits[0, -1].float().cpu()
            if temperature == 0:
                drawn = last.argmax().unsqueeze(0)
            else:
                chances = torch.softmax(last / temperature, dim=0)
                drawn = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)])
        return tokens
