"""Models that count in their buffers are refused; what a run of theirs has changed is put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mosaic.errors import UnsplittableError
from mosaic.ranks.pipeline.setup import unchanged_buffers


class Average(nn.Module):
    """Keeps an average of what it has seen: in place, or as another tensor."""

    def __init__(self, *, replaces: bool, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4), persistent=persistent)
        self.replaces = replaces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.replaces:
            self.seen = 0.9 * self.seen + x.detach().flatten(0, -2).mean(0)
        else:
            self.seen.mul_(0.9).add_(x.detach().flatten(0, -2).mean(0))
        return x - self.seen


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.InstanceNorm1d(4, track_running_stats=True), "1.running_mean of a InstanceNorm1d changes"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 40)), "1.*_u of a _SpectralNorm changes"),
        (lambda: Average(replaces=False), "1.seen of a Average changes with each forward.*let the loop change it"),
        (lambda: Average(replaces=True), "1.seen of a Average changes"),
    ],
)
def test_a_buffer_that_changes_with_each_forward_is_refused_and_put_back(make: Callable[[], nn.Module], said: str):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), make())
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(UnsplittableError, match=said), unchanged_buffers(model):
        model(torch.randn(6, 4, 4))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_caches_and_frozen_statistics_are_no_reason():
    model = nn.Sequential(nn.BatchNorm1d(4), Average(replaces=False, persistent=False))
    model[0].eval()
    with unchanged_buffers(model):
        model(torch.randn(6, 4))
