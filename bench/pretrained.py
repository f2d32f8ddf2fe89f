"""A Llama of random weights, from its files: `python bench/pretrained.py lora|full [--layers 28] [--save]`.

`lora`: adapters of peft on a base that streams from NVMe; `full`: all weights, with everything on NVMe. It trains in a
process of its own, in a memory cgroup of what its imports take, the planned peak, a tenth of that more, and for `full`
what a batch computes with, measured in plain torch; where no cgroup can be made there is no limit. `--resident` trains
the same adapters with the base in RAM, and compares them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import Disk
from bench.report import Folder, Json, Report, Save, Table, scratch
from bench.trainer import begin_peak_rss, peak_rss_bytes
from offload import OffloadZero, Tuning
from offload.checkpoint.extra import memory_of
from offload.checkpoint.tensors import Entry, stream
from offload.model.meta_init import FromSafetensors
from offload.planner.explain import plan_of
from offload.sizes import MIB, format_bytes

WIDTH, INNER, VOCABULARY, HEAD = 3072, 8192, 32000, 128
"""Of a Llama of 3e9 parameters in 28 layers."""
RANDOM = 1 << 24
"""So many normal numbers serve for all weights, from another place on for each."""
CGROUPS = Path("/sys/fs/cgroup")
MARGIN = 1.1
ABOUT = """\
`planned peak`: RAM and the model's device, which is RAM here, for the least `cpu_memory`; `limit`: of the memory
cgroup, the imports, the planned peak, a tenth of that, and `computing`, what plain torch takes for forward and backward
of one block and the loss, with what enters the other blocks (limit 0: none could be made); `disk alone`: a step's bytes
by its bandwidth."""

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Job:
    """What a child process trains. Attributes: kind: "lora" or "full"; layers, width: of the model; tokens: of a step;
    folder: where the model and the run lie; is_resident: whether the base is in RAM."""

    kind: str
    layers: int
    width: int
    tokens: int
    steps: int
    folder: str = ""
    is_resident: bool = False

    @property
    def directory(self) -> Path:
        """The folder of the model's files."""
        return Path(self.folder, "model")

    @property
    def adapters(self) -> Path:
        """The file of the trained adapters."""
        return Path(self.folder, f"adapters{'-resident' * self.is_resident}")

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {"commit_every": None, "tuning": Tuning(chunk=64 * MIB)}
        if self.kind == "full":
            return given | {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "path": f"{self.folder}/run"}
        if self.is_resident:
            return given | {"tier": "cpu", "param_tier": "device"}
        return given | {"tier": "cpu", "param_tier": "nvme", "path": f"{self.folder}/run"}


def write_model(job: Job) -> int:
    """Writes the model as transformers does, a layer a file. Returns its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, directory = job.width, job.directory
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=INNER * width // WIDTH,
        num_hidden_layers=job.layers, num_attention_heads=width // HEAD,
        num_key_value_heads=max(width // HEAD // 3, 1), dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(directory)
    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    pool = torch.randn(RANDOM, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def pieces(name: str, tensor: Tensor) -> Iterator[memoryview]:
        if tensor.dim() == 1:  # of a norm
            yield memory_of(torch.ones(tensor.shape, dtype=torch.bfloat16))
            return
        left, start = tensor.numel(), zlib.crc32(name.encode()) % RANDOM
        while left:
            piece = pool[start : start + left]
            yield memory_of(piece)
            left, start = left - piece.numel(), 0

    files: dict[str, list[Entry]] = {}
    for name, tensor in tensors.items():
        layer = name.split(".")[2] if ".layers." in name else "ends"
        entry = Entry(name, torch.bfloat16, tuple(tensor.shape), partial(pieces, name, tensor))
        files.setdefault(f"model-{layer}.safetensors", []).append(entry)
    for file, entries in files.items():
        with (directory / file).open("wb") as out:
            out.writelines(stream(entries, {"format": "pt"}))
    weights = {entry.name: file for file, entries in files.items() for entry in entries}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return sum(tensor.numel() for tensor in tensors.values())


def built(job: Job) -> Any:
    """The model on the meta device, with adapters if they are trained."""
    import transformers
    from peft import LoraConfig, get_peft_model

    config = transformers.AutoConfig.from_pretrained(job.directory)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if job.kind == "full":
        return model
    model.activation_checkpointing_enable()
    return get_peft_model(model.train(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def values(job: Job, model: Any) -> Any:
    """The `init` of OffloadZero for a model with adapters."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    files = FromSafetensors(job.directory)
    angles = dict(LlamaRotaryEmbedding(model.config).named_buffers())

    def fill(name: str, tensor: Tensor) -> None:
        known = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if "lora_A" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        elif "lora_B" in name:
            tensor.zero_()
        elif files.has(known):
            tensor.copy_(files.read(known))
        else:
            tensor.copy_(angles[known.rpartition(".")[2]])

    return fill


def planned(job: Job) -> tuple[int, int, int]:
    """Bytes that imports took, the least `cpu_memory`, and the `device_memory` that goes with it, which is RAM here,
    too."""
    imports = peak_rss_bytes()
    model = built(job)
    plan = plan_of(model, direct=True, **job.options)
    least = plan.least()
    placement = plan.with_memory(least).place()
    return imports, least, placement.device_bytes


def computing(job: Job) -> int:
    """RAM that computing takes and no tier holds, measured in plain torch: forward and backward of one block and the
    loss, without weights and gradients, and what the other blocks keep for their recomputation."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(job.directory)
    others, config.num_hidden_layers = config.num_hidden_layers - 1, 1
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.activation_checkpointing_enable()
    model.train()
    for _ in range(2):  # the gradients are there in the second round
        before = begin_peak_rss()
        _loss_of(model, job, 0).backward()
    waiting: int = others * job.tokens * config.hidden_size * torch.bfloat16.itemsize
    return peak_rss_bytes() - before + waiting


def _loss_of(model: Any, job: Job, step: int) -> Tensor:
    tokens = torch.randint(VOCABULARY, (1, job.tokens), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=tokens, labels=tokens).loss
    assert isinstance(loss, Tensor)
    return loss


def train(job: Job, memory: dict[str, int]) -> dict[str, Any]:
    """Trains, and returns figures. Args: memory: budgets, as options of OffloadZero."""
    model = built(job)
    options = job.options | memory
    trained = [param for param in model.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-4)
    start = time.perf_counter()
    if job.kind == "lora":
        optimizer = OffloadZero(model, adamw, init=values(job, model), **options)
    else:
        from transformers import AutoModelForCausalLM

        from offload.integrations.transformers import from_pretrained

        del model
        model, optimizer = from_pretrained(
            AutoModelForCausalLM, job.directory, partial(torch.optim.AdamW, lr=1e-4), **options
        )
        model.activation_checkpointing_enable()
        model.train()
    seconds, read, losses = [time.perf_counter() - start], [0], []
    with optimizer:
        for step in range(job.steps):
            start = time.perf_counter()
            loss = _loss_of(model, job, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            read.append(optimizer.stats()["nvme_read_bytes"] + optimizer.stats()["nvme_written_bytes"])
        peak = peak_rss_bytes()  # close() may bring all parameters back
        if job.kind == "lora":
            torch.save([param.detach().clone() for param in trained], job.adapters)
        disk = optimizer.stats()["disk_bytes"] if "path" in options else 0
    return {"seconds": seconds, "moved_bytes": read[-1] - read[-2], "peak": peak, "losses": losses, "disk_bytes": disk}


@app.command(hidden=True)
def child(what: str, job: str, memory: str) -> None:
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import offload.integrations.transformers  # noqa: F401

    given = Job(**json.loads(job))
    if what == "train":
        print(json.dumps(train(given, json.loads(memory))))
    else:
        print(json.dumps(planned(given) if what == "plan" else computing(given)))


@contextmanager
def cgroup(limit: int) -> Iterator[Path | None]:
    """A new memory cgroup with a limit; None where none can be made."""
    root = CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS
    folder = root / f"offload-bench-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(limit))
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        yield None
        return
    try:
        yield folder
    finally:
        folder.rmdir()


def _peak_of(group: Path | None) -> int:
    """The most that was charged to a cgroup, with page cache that it could have dropped."""
    names = ("memory.peak", "memory.max_usage_in_bytes")
    found = [group / name for name in names if group is not None and (group / name).exists()]
    return int(found[0].read_text()) if found else 0


def asked(what: str, job: Job, memory: dict[str, int] | None = None, group: Path | None = None) -> Any:
    """What a child process answers to `what`."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    words = [sys.executable, __file__, "child", what, json.dumps(asdict(job)), json.dumps(memory or {})]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=enter)
    return json.loads(done.stdout.splitlines()[-1])


@app.command()
def lora(
    layers: int = 28, width: int = WIDTH, tokens: int = 64, steps: int = 3, resident: bool = False,
    path: Folder = Path(), as_json: Json = False, save: Save = False,
) -> None:  # fmt: skip
    """Adapters on a base that streams."""
    _measure(Job("lora", layers, width, tokens, steps), path, resident).publish(as_json=as_json, save=save)


@app.command()
def full(
    layers: int = 23, width: int = WIDTH, tokens: int = 1024, steps: int = 2,
    path: Folder = Path(), as_json: Json = False, save: Save = False,
) -> None:  # fmt: skip
    """All weights."""
    _measure(Job("full", layers, width, tokens, steps), path).publish(as_json=as_json, save=save)


def _measure(job: Job, path: Path, resident: bool = False) -> Report:
    ways = ("read",) if job.kind == "lora" else ("read", "write")
    with scratch(path) as folder:
        job = replace(job, folder=str(folder))
        row, remarks = _in_cgroup(job)
        if resident:
            other = replace(job, is_resident=True)
            asked("train", other)
            pairs = zip(torch.load(job.adapters), torch.load(other.adapters), strict=True)
            row["adapters are equal"] = is_same = all(torch.equal(mine, theirs) for mine, theirs in pairs)
            remarks.append(f"adapters equal those of a resident run, bit for bit: {'yes' if is_same else 'NO'}")
    with scratch(path) as folder:
        disk = Disk(folder, 64, 16 * MIB)
        rate = len(ways) * disk.count * disk.length / disk.run(ways=ways)
    row["disk alone s"] = round(row["a step's bytes"] / rate, 1)
    remarks.append(f"the disk alone: {rate / 1e9:.2f} GB/s, {' and '.join(ways)}")
    about = (
        f"{'Adapters of rank 8 on the projections of queries and values' if job.kind == 'lora' else 'All weights'} of "
        f"a Llama of {job.layers} layers and width {job.width}, {job.tokens} tokens a step, bf16, checkpoints of its "
        f"own. {ABOUT}"
    )
    cells = [
        [name, format_bytes(int(value)) if "bytes" in name else f"{value:,}"]
        for name, value in row.items()
        if not isinstance(value, bool)  # a remark says it
    ]
    title = f"A pretrained model: {job.kind}"
    return Report(f"pretrained-{job.kind}", title, about, [Table(["what", "value"], cells)], row, remarks)


def _in_cgroup(job: Job) -> tuple[dict[str, float], list[str]]:
    """Writes the model, and trains it in as little memory as is planned. Returns: figures and remarks."""
    job.directory.mkdir()
    numel = write_model(job)
    imports, least, on_device = asked("plan", job)
    peak = least + on_device
    # With the few tokens of `lora` it fits into the margin.
    beside = asked("compute", job) if job.kind == "full" else 0
    limit = imports + round(MARGIN * peak) + beside
    with cgroup(limit) as group:
        # Else the device would be given half of what is free, and what is too large for that would run in tiles.
        found = asked("train", job, {"cpu_memory": least, "device_memory": on_device}, group)
        is_limited, used = group is not None, _peak_of(group)
    row = {
        "parameters": numel,
        "weights bytes": 2 * numel,
        "imports bytes": imports,
        "planned peak bytes": peak,
        "computing bytes": beside,
        "limit bytes": limit if is_limited else 0,
        "cgroup's peak bytes": used,
        "peak rss bytes": found["peak"],
        "disk bytes": found["disk_bytes"],
        "a step's bytes": found["moved_bytes"],
        "construct s": round(found["seconds"][0], 1),
        "step s": round(min(found["seconds"][1:]), 1),
    }
    return row, [f"losses {', '.join(f'{loss:.4f}' for loss in found['losses'])}"]


if __name__ == "__main__":
    app()
