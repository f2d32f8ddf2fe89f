"""Mixed-precision AdamW as a user would write it in plain torch: a 16-bit model, fp32 masters, one operation a line.

The order of operations is that of docs/exactness.md, so that with the same gradients the bits are the library's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW(torch.optim.Optimizer):
    """Args: optimizer: Adam or AdamW whose param groups are taken over; dtype: of the model from now on."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self._masters: dict[nn.Parameter, Tensor] = {}
        self._rounded: dict[nn.Parameter, Tensor] = {}
        for param in model.parameters():
            if param.is_floating_point():
                self._masters[param] = param.detach().float().clone()
                param.data = param.data.to(dtype)
                self._rounded[param] = param.detach().clone()
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))

        def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
            def one(x: Any) -> Any:
                return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

            return tuple(map(one, args)), {name: one(x) for name, x in kwargs.items()}

        model.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; what was written to a parameter since the last one goes to its master first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, group)
        return loss

    def _step_one(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        master, state = self._masters[param], self.state[param]
        written = param.detach() != self._rounded[param]
        master[written] = param.detach()[written].float()
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
        state["step"] += 1
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        assert param.grad is not None
        grad = param.grad.float()
        if group.get("decoupled_weight_decay"):
            master.mul_(1 - lr * decay)
        elif decay:
            grad = grad + decay * master
        exp_avg.add_((grad - exp_avg) * (1 - beta1))
        exp_avg_sq.mul_(beta2).add_((grad * (1 - beta2)) * grad)
        # torch.sqrt of fp32 on a CPU is MKL's, which is an ulp off on some. That of fp64, rounded, is the exact root.
        root = exp_avg_sq.double().sqrt().float()
        denominator = root / math.sqrt(correction2) + group["eps"]
        master.add_((exp_avg * -(lr / correction1)) / denominator)
        param.copy_(master)
        self._rounded[param] = param.detach().clone()
