"""Lightning over several ranks: no DistributedDataParallel around a held model."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from offload import OffloadZero


class OffloadStrategy(DDPStrategy):  # type: ignore[misc]  # lightning is not there where types are checked
    """Lightning's DDP strategy without its wrapper: OffloadZero averages over the ranks, and gives all what rank 0 has.

        trainer = Trainer(devices=2, strategy=OffloadStrategy())

    Where Trainer accumulates, an optimizer with accumulation="auto" gets its `accumulate_grad_batches`.

    Args: those of DDPStrategy that are about processes. Those of DistributedDataParallel have no effect.
    """

    def configure_ddp(self) -> None:
        """Wraps nothing."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        passes = self.lightning_module.trainer.accumulate_grad_batches
        if passes > 1:  # a module that steps by itself may accumulate, too
            for optimizer in self.optimizers:
                if isinstance(optimizer, OffloadZero):
                    optimizer.accumulation = passes
