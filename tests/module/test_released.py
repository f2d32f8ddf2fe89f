"""What can be done to a parameter whose values are elsewhere: a clear error or the right answer, never a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PRELUDE = """
import copy, io, pickle, sys, numpy, torch
from pathlib import Path
from offload import OffloadZero, ReleasedParameterError
from tests.support.streamed import Net, batch
torch.set_num_threads(1)
model = Net()
optimizer = OffloadZero(model, param_tier="cpu", cpu_memory="64MiB")
p = model.blocks[1].after
"""

EACH = """
for use in sys.argv[1:]:
    print(use, file=sys.stderr, flush=True)  # before it crashes
    try:
        exec(use)
    except ReleasedParameterError as error:
        assert "gathered" in str(error), error
    else:
        raise SystemExit(use + ": nothing was raised")
    with optimizer.gathered(p):
        p.sum().item()
    model(batch(0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

USES = """
p + 1
p.sum()
p.data
p.detach()
p.view(-1)
p[0]
p.T
p.tolist()
p.cpu()
p.numpy()
p.data_ptr()
p.untyped_storage()
p.fill_(1.0)
bool(p == p)
numpy.asarray(p)
torch.stack([p, p])
torch._foreach_add_([p], 1.0)
torch.nn.functional.linear(torch.ones(1, 12), p)
torch.nn.utils.parameters_to_vector(model.parameters())
copy.deepcopy(p)
copy.deepcopy(model)
copy.copy(p)
pickle.dumps(p)
torch.save(p, io.BytesIO())
torch.save(model, io.BytesIO())
torch.utils.swap_tensors(p, p)
torch.from_dlpack(p)
model.float()
model.share_memory()
list(p)
"""


INSIDE = """
assert p.shape == (12, 12) and p.dtype is torch.bfloat16 and p.numel() == 144 and len(p) == 12
assert isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf and p.grad is None
assert 'shape=(12, 12)' in repr(p) and 'Linear' in repr(model) and p in {p} and str(p)
model.zero_grad(); model.requires_grad_(True); model.eval().train()
file = io.BytesIO()
with optimizer.gathered(model):
    twin, lone = copy.deepcopy(model), copy.deepcopy(p)
    torch.save(model, file)
    assert torch.equal(twin.blocks[1].after, p) and torch.equal(lone, p)
twin(batch(0).bfloat16()).sum().backward(); twin.state_dict()
file.seek(0)
again = torch.load(file, weights_only=False)
assert all(torch.equal(a, b) for a, b in zip(again.parameters(), twin.parameters(), strict=True))
"""


def run(code: str, *args: str) -> None:
    """In a process of its own, which may crash."""
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]


def test_uses_are_refused() -> None:
    run(PRELUDE + EACH, *USES.strip().splitlines())


def test_questions_are_answered_and_copies_inside_gathered_are_whole() -> None:
    run(PRELUDE + INSIDE)
