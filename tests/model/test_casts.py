"""What is cast on the way into a held model, and what stays fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, OffloadZero


class Steps(nn.Module):
    """Notes the time steps that it gets, as diffusion models do, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        self.seen.append(time)
        out: Tensor = self.linear(x.to(self.linear.weight.dtype))
        return out


def test_inputs_are_cast_unless_asked_not_to() -> None:
    for casts, expected in ((True, torch.tensor(1000.0)), (False, torch.tensor(999.0))):
        model = Steps()
        with OffloadZero(model, cast_forward_inputs=casts):
            model(torch.ones(1, 4), time=torch.tensor(999.0))
        assert torch.equal(model.seen[0].float(), expected)
        assert model.seen[0].dtype is (torch.bfloat16 if casts else torch.float32)


def test_a_wrong_choice_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cast_forward_inputs='no'"):
        OffloadZero(nn.Linear(2, 2), cast_forward_inputs="no")  # type: ignore[arg-type]


def with_statistics() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)),
        nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)),
    ]


@pytest.mark.parametrize("number", range(3), ids=["batch norm", "spectral norm", "spectral norm by hook"])
@pytest.mark.parametrize("options", [{}, {"param_tier": "cpu"}], ids=["resident", "streamed"])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_modules_with_running_statistics_train_with_default_options(number: int, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = with_statistics()[number]
    plain = with_statistics()[number]
    plain.load_state_dict(model.state_dict())
    x = torch.randn(16, 6)
    twin = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options) as optimizer:  # type: ignore[arg-type]
        for _ in range(4):
            losses = []
            for one, by in ((model, optimizer), (plain, twin)):
                loss = one(x).float().square().mean()
                loss.backward()
                by.step()
                by.zero_grad()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=0.05)
        kept = [p.dtype for p in model[0 if number else 1].parameters()]
        assert torch.float32 in kept
        assert model[3 - (number > 0)].weight.dtype is torch.bfloat16
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffer.float(), buffers[name].float(), atol=0.05), name
