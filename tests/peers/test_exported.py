"""Exported weights load in the transformers library, with the model's config beside them, and give the same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from offload import OffloadZero, Tuning
from offload.checkpoint.export import entries, export
from offload.checkpoint.reader import Reader
from offload.cli.main import app
from tests.peers.test_transformers import gpt2, llama

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformers")

MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama("Llama"),
    "llama, tied": llama("Llama", tie_word_embeddings=True),
    "qwen2": llama("Qwen2"),
    "gpt2": gpt2(tied=False),
    "gpt2, tied": gpt2(tied=True),
}
TOKENS = torch.arange(24).reshape(2, 12) % 64


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(TOKENS).logits
    return found.clone()


def trained(kind: str, path: Path, split: bool) -> tuple[Any, Tensor, Path]:
    """A model that has trained and committed, its logits, and a folder that it was exported to while it lived."""
    torch.manual_seed(4)
    model = MODELS[kind]()
    tuning = Tuning(chunk="8KiB", split_master=split)
    with OffloadZero(model, path=path / "run", commit_every=0, tuning=tuning) as optimizer:
        for _ in range(3):
            model.train()(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.commit()
        logits = logits_of(model)
        optimizer.export(path / "live")
    return model, logits, path / "live"


@pytest.mark.parametrize("split", [False, True], ids=["whole masters", "split masters"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_exported_loads_and_gives_the_same_logits(kind: str, split: bool, tmp_path: Path) -> None:
    model, logits, live = trained(kind, tmp_path, split)
    stored, sharded = tmp_path / "stored", tmp_path / "sharded"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(stored)])
    assert done.exit_code == 0, done.output
    with Reader([tmp_path / "run"]) as reader:
        assert len(export(sharded, entries(reader), shard_bytes=20_000)) > 3
    for folder in (live, stored, sharded):
        model.config.save_pretrained(folder)
        again, report = type(model).from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not report["unexpected_keys"], report
        assert not report["missing_keys"], report
        assert torch.equal(logits_of(again), logits), folder.name
        with torch.no_grad():
            next(again.parameters()).add_(1)
        assert not torch.equal(logits_of(again), logits)
