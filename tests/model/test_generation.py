"""The warning where each token of a text moves the model. Any other warning is an error of the test run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero
from offload.model.generation import TOKENS
from offload.sizes import format_bytes

WIDTH, BLOCKS = 48, 3
BYTES = BLOCKS * (WIDTH * WIDTH + WIDTH) * 4
"""Of the blocks, which come for each token."""


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        for block in self.blocks:
            h = block(h)
        return h @ self.embed.weight.T

    @torch.no_grad()
    def generate(self, count: int) -> None:
        for _ in range(count):
            self(torch.zeros(1, 1, dtype=torch.long))


@pytest.fixture
def held() -> Iterator[tuple[Words, OffloadZero]]:
    model = Words()
    with OffloadZero(model, param_tier="cpu", compute_dtype=torch.float32) as optimizer:
        yield model, optimizer


def test_many_tokens_warn_once_with_what_each_moves(held: tuple[Words, OffloadZero]) -> None:
    model, optimizer = held
    model.generate(TOKENS)
    before = optimizer.stats()["gathered_bytes"]
    with pytest.warns(UserWarning, match=r"generate inside `with optimizer.generating\(\):`") as caught:
        model.generate(TOKENS + 1)
    (warning,) = caught
    of_a_token = (optimizer.stats()["gathered_bytes"] - before) // (TOKENS + 1)
    assert f"each token moves {format_bytes(of_a_token)} of" in str(warning.message)
    assert BYTES <= of_a_token <= 1.5 * BYTES
    assert warning.filename == __file__
    model.generate(2 * TOKENS)


def test_where_nothing_moves_nothing_is_said(held: tuple[Words, OffloadZero]) -> None:
    model, optimizer = held
    with optimizer.gathered(model):
        model.generate(2 * TOKENS)


def test_evaluations_and_short_texts_are_no_generation(held: tuple[Words, OffloadZero]) -> None:
    model, _ = held
    with torch.no_grad():
        for _ in range(2 * TOKENS):
            model(torch.zeros(1, 8, dtype=torch.long))
    for _ in range(4):
        model.generate(TOKENS // 2)
        model(torch.zeros(1, 8, dtype=torch.long))


def test_a_model_that_does_not_stream_is_no_concern() -> None:
    model = Words()
    with OffloadZero(model), warnings.catch_warnings():
        model.generate(2 * TOKENS)
