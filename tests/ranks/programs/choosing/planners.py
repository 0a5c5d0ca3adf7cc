"""Training a small graph under the plans of every planner: what the ranks of a gloo group do."""

from __future__ import annotations

import torch
from engine_cases import FAST
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.ranks.compare import compare_plans

WIDTH = 4


class Chains(nn.Module):
    """Two nodes on the batch, and one on what both return."""

    names = ("left", "right", "last")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in self.names:
            setattr(self, name, nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.left(x) + self.right(x)).square().mean()


class Small:
    """A model with its batch and loss."""

    def __init__(self) -> None:
        self.model = Chains()
        self.sample = torch.ones(2, WIDTH)

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        return output


def compared(rank: int, size: int) -> None:
    """Measures the plans of three planners in turn with data-parallel training."""
    settings, backend = FAST, HostBackend(1)
    methods = ("sequential", "data-parallel", "exact")
    measured = compare_plans(Small, methods, rounds=2, steps=2, settings=settings, backend=backend)
    assert tuple(row.method for row in measured) == methods
    _, whole, exact = measured
    assert (len(whole.step_ms), len(whole.ratios)) == (4, 2)
    parameters = sum(p.nbytes for p in Chains().parameters())
    # Parameters, gradients, and AdamW's two moments; its counts of steps are a few bytes more.
    for held in (*whole.held_bytes, *whole.ddp_held_bytes):
        assert 4 * parameters <= held <= 4.1 * parameters + 200
    assert whole.sent_bytes["reduce"] == 2 * parameters  # everything runs on both ranks
    assert exact.step_ms or exact.reason
