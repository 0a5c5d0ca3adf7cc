"""The agreement of the ranks of a day, on one rank; tests of ranks hold it on several."""

from __future__ import annotations

import torch

from mosaic.retrain.worker.group import WorkerGroup

CPU = torch.device("cpu")


def test_the_loss_of_a_step_is_the_sum_over_its_micro_batches():
    group = WorkerGroup(CPU)
    losses = [torch.tensor(0.25), torch.tensor(0.5, dtype=torch.bfloat16)]
    assert group.mean_loss(group.bring(losses)) == 0.75
    assert group.agree((True, False), group.bring(losses)) == ((True, False), 0.75)
    assert group.agree((True, False), None) == ((True, False), None)
