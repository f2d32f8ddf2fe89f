"""A Llama of transformers, sharded by its own tensor-parallel plan, against torch with AdamW on fp32 masters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from offload import OffloadZero
from tests.support import tensor_parallel as tp
from tests.support.ranks import Worlds

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")

STEPS = 3
CLOSE = 2e-3
"""Of losses and norms, relative: as in tests/distributed/test_tensor_parallel.py."""


def saved(folder: Path) -> str:
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=tp.WORDS, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _sharded(folder: str) -> nn.Module:
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    made: nn.Module = transformers.LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    assert any(isinstance(param, DTensor) for param in made.parameters())
    return made.train()


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(input_ids=batch[0]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def _held(folder: str, options: dict[str, Any]) -> tp.Trained:
    model, found, drawn = _sharded(folder), tp.Trained(), tp.batches(0, 1)
    with OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=tp.LR), **options) as optimizer:
        for _ in range(STEPS):
            loss = _loss(model, next(drawn))
            loss.backward()
            found.losses.append(loss.item())
            found.norms.append(optimizer.clip_grad_norm_(tp.CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found.losses.append(_loss(model, next(drawn)).item())
        found.masters = tp.masters_of(model, optimizer)
    return found


def _by_torch(folder: str) -> tp.Trained:
    model, found, drawn = _sharded(folder), tp.Trained(), tp.batches(0, 1)
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    model.to(torch.bfloat16)
    adamw = torch.optim.AdamW(masters.values(), lr=tp.LR)
    for _ in range(STEPS):
        loss = _loss(model, next(drawn))
        loss.backward()
        found.losses.append(loss.item())
        for name, param in model.named_parameters():
            masters[name].grad = tp._averaged(param, param.grad, None)
        found.norms.append(tp._clip([*masters.values()]))
        adamw.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
                param.grad = None
    with torch.no_grad():
        found.losses.append(_loss(model, next(drawn)).item())
    found.masters = {name: tp._whole(master) for name, master in masters.items()}
    return found


def test_a_llama_with_its_own_plan_trains_as_with_torch(worlds: Worlds, tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama")
    wanted = worlds(2).run(_by_torch, folder, timeout_s=170)
    places: list[dict[str, Any]] = [
        {},
        {"param_tier": "cpu", "activation_tier": "cpu", "partition_activations": True},
        {"path": str(tmp_path / "run"), "param_tier": "nvme", "commit_every": None},
    ]
    runs = [worlds(2).run(_held, folder, options, timeout_s=170) for options in places]
    for found in runs:
        for one, other in zip(found, wanted, strict=True):
            assert one.losses == pytest.approx(other.losses, rel=CLOSE)
            assert one.norms == pytest.approx(other.norms, rel=CLOSE)
        assert [one.losses for one in found] == [one.losses for one in runs[0]]
        assert all(torch.equal(found[1].masters[name], values) for name, values in runs[0][0].masters.items())
