"""What bench/ddp.py and bench/overlap.py share: the GPT that each of some ranks trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.models.gpt import GPT, GPTConfig

RANKS = 2


@dataclass(frozen=True)
class Shape:
    """What is trained: `batch` sequences of `seq` bytes a rank and step."""

    layers: int
    width: int
    batch: int
    seq: int

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(param.numel() for param in GPT(self._config, device="meta").parameters())

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self._config)

    @property
    def _config(self) -> GPTConfig:
        return GPTConfig(layers=self.layers, width=self.width, heads=4, context=self.seq)
