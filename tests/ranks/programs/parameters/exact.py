"""Trains some steps on any number of ranks, so that they can be compared bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mosaic.train import tree_sum
from mosaic.train.data.loader import BatchCut
from mosaic.train.data.seeds import seed_step
from ranks.begun import join

BATCH = 24
STEPS = 3


class Model(nn.Module):
    """Has what differs between ranks if anything does: statistics, dropout, parameters used by some rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.rare = nn.Linear(8, 1)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        self.seen.fill_(True)
        hidden = nn.functional.dropout(self.norm(self.first(x)).relu().mean(-1), 0.3)
        return self.last(hidden) + (self.rare(hidden) if rare else 0)


def trained(rank: int, size: int, micro_batches: int) -> dict[str, list[float]]:
    """Returns all parameters, buffers and momenta after some steps."""
    torch.manual_seed(0)
    model = Model()
    cut = BatchCut(batch=BATCH, rank=rank, num_ranks=size, micro_batches=micro_batches, exact=True)
    exact = tree_sum.ExactStep(model, cut)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(STEPS * BATCH, 3, 9, generator=torch.Generator().manual_seed(1))
    for step in range(STEPS):
        for index in cut.own:
            seed_step(5, step, index)
            with exact.micro_batch(index):
                rows = data[list(cut.positions(step, index))]
                loss = model(rows, rare=step == 1 and index == micro_batches - 1).square().mean()
                (loss * len(rows) / BATCH).backward()
        exact.finish()
        assert model.never.weight.grad is None
        assert (model.rare.weight.grad is not None) == (step == 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    momenta = {f"momentum {n}": s["exp_avg"] for n, s in enumerate(optimizer.state.values())}
    return {name: tensor.reshape(-1).tolist() for name, tensor in (model.state_dict() | momenta).items()}


def train(rank: int, size: int, place: Path) -> None:
    join(rank, size, place)
    tree_sum.BUCKET_BYTES = 64  # several buckets
    found = {count: trained(rank, size, count) for count in (4, 12) if count % size == 0}
    (place / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
