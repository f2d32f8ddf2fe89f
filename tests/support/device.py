"""What tests of training run on: the CPU; in processes of their own, the simulated accelerator."""

from __future__ import annotations

from tests.support import accelerator

DEVICE = accelerator.NAME if accelerator.is_wanted() else "cpu"
