"""Training a small model under the plans of several planners: the program of each rank of a gloo group."""

from __future__ import annotations

from types import SimpleNamespace

from engine_cases import FAST

from mosaic.backends.host.backend import HostBackend
from mosaic.ranks.compare import compare_plans
from ranks.clip import Clip, batch_of, mean_loss


def compared(rank: int, size: int) -> None:
    """Measures the plans of three planners in turn with data-parallel training."""

    def make() -> SimpleNamespace:
        return SimpleNamespace(model=Clip(), sample=batch_of(0, rank, (3, 3)), loss=mean_loss)

    methods = ("sequential", "data-parallel", "exact")
    measured = compare_plans(make, methods, rounds=2, steps=2, settings=FAST, backend=HostBackend(1))
    assert tuple(row.method for row in measured) == methods
    _, whole, exact = measured
    assert (len(whole.step_ms), len(whole.ratios)) == (4, 2)
    num_bytes = [parameter.nbytes for parameter in Clip().parameters()]
    # Parameters, gradients, and AdamW's two moments; its counts of steps are a few bytes more.
    for held in (*whole.held_bytes, *whole.ddp_held_bytes):
        assert 4 * sum(num_bytes) <= held <= 4.1 * sum(num_bytes) + 200
    assert whole.sent_bytes["reduce"] == 2 * (sum(num_bytes) - 4)  # all modules run on both ranks; the scale is in none
    assert exact.step_ms or exact.reason
