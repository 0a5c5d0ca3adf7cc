"""What ranks tell each other, where there is one; on several, tests of ranks see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mosaic.retrain.worker.environment import use_repeatable_kernels
from mosaic.retrain.worker.group import WorkerGroup

CPU = torch.device("cpu")


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)


def test_the_loss_of_a_step_is_the_sum_over_its_micro_batches():
    group = WorkerGroup(CPU)
    losses = [torch.tensor(0.25), torch.tensor(0.5, dtype=torch.bfloat16)]
    assert group.mean_loss(group.bring(losses)) == 0.75
    assert group.agree((True, False), group.bring(losses)) == ((True, False), 0.75)
    assert group.agree((True, False), None) == ((True, False), None)


@pytest.mark.usefixtures("plain_kernels")
def test_repeatable_kernels_fill_no_tensor_that_is_made_without_values():
    use_repeatable_kernels(CPU)
    assert torch.are_deterministic_algorithms_enabled()
    with torch.profiler.profile() as profile:
        torch.empty(1000)
    assert all(event.key != "aten::fill_" for event in profile.key_averages())
