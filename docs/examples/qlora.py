"""Adapters of peft on a base in 4 bits that streams from NVMe (QLoRA), on a tiny model that is made here."""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from offload import OffloadZero

rows = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(0))
sizes = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}


def make(folder: Path) -> None:
    """What would be downloaded: a model in 16 bits."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)).bfloat16().save_pretrained(
        folder
    )


def train(base: Path, folder: Path, *, steps: int, resume: bool) -> None:
    torch.manual_seed(0)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4, device_map="cpu", dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    model.train()  # from_pretrained evaluates, in which bitsandbytes packs its codes anew on some CPUs
    adapters = {name: param for name, param in model.named_parameters() if param.requires_grad}
    adamw = torch.optim.AdamW(adapters.values(), lr=1e-2)
    options = {"tier": "cpu", "param_tier": "nvme", "commit_every": 4, "resume": resume}
    with OffloadZero(model, adamw, path=folder / "run", **options) as optimizer:
        first = 0 if optimizer.resumed is None else optimizer.resumed.step
        for step in range(first, steps):
            batch = rows[torch.arange(4 * step, 4 * step + 4) % len(rows)]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1:2d}  loss {loss.item():.3f}")
        torch.save({name: param.detach().cpu() for name, param in adapters.items()}, folder / "adapters.pt")


with tempfile.TemporaryDirectory() as scratch:
    make(Path(scratch) / "base")
    train(Path(scratch) / "base", Path(scratch), steps=4, resume=False)
    print("resumed")
    train(Path(scratch) / "base", Path(scratch), steps=8, resume=True)
