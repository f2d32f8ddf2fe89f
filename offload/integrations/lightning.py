"""Lightning over several ranks, without DistributedDataParallel; and clipping under mixed precision."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy

from offload import OffloadZero


class OffloadStrategy(DDPStrategy):  # type: ignore[misc]  # lightning is not there where types are checked
    """Lightning's DDP strategy without its wrapper: OffloadZero averages over the ranks, and gives all what rank 0 has.

        trainer = Trainer(devices=2, strategy=OffloadStrategy())

    Where Trainer accumulates, an optimizer with accumulation="auto" gets its `accumulate_grad_batches`.

    It takes the arguments of DDPStrategy that are about processes. Those of DistributedDataParallel have no effect.
    """

    def configure_ddp(self) -> None:
        """Wraps nothing."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        micro_batches = self.lightning_module.trainer.accumulate_grad_batches
        if micro_batches > 1:  # a module that steps by itself may accumulate, too
            for optimizer in self.optimizers:
                if isinstance(optimizer, OffloadZero):
                    optimizer.accumulation = micro_batches


class OffloadPrecision(MixedPrecision):  # type: ignore[misc]
    """Lightning's mixed precision, which also clips the gradients of an OffloadZero: `gradient_clip_val`.

        trainer = Trainer(plugins=[OffloadPrecision("16-mixed", "cuda")], gradient_clip_val=1.0)

    Lightning's own class refuses to clip these, because OffloadZero can divide out a loss scale by itself. Here it is
    divided out before `on_before_optimizer_step`, as for other optimizers. It takes the arguments of MixedPrecision.
    """

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        has_gradients = any(param.grad is not None for group in optimizer.param_groups for param in group["params"])
        if self.scaler is not None and has_gradients and isinstance(optimizer, OffloadZero):
            self.scaler.unscale_(optimizer)
        super()._after_closure(model, optimizer)

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        (Precision if isinstance(optimizer, OffloadZero) else MixedPrecision).clip_gradients(
            self, optimizer, *args, **kwargs
        )
