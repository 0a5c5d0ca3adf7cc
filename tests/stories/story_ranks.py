"""Loops of users on several ranks, each beside the plain loop; run by the nursery, or by torchrun as a user would."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from story_models import TwoTowers, make_batch, make_model, make_target
from torch import Tensor, nn

import mosaic

STEPS = 6
ROWS = 4
"""Of a rank's slice of the batch."""


def join(rank: int, size: int, place: Path) -> None:
    """What torchrun's variables do for a user's script."""
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=size)


def make_even_model() -> TwoTowers:
    """Without dropout, whose numbers each rank draws itself."""
    return make_model().eval()


def rows_of(rank: int, tensor: Tensor) -> Tensor:
    return tensor[rank * ROWS : (rank + 1) * ROWS]


def batch_of(rank: int, size: int, step: int) -> dict[str, Tensor]:
    return {name: rows_of(rank, value) for name, value in make_batch(step, ROWS * size).items()}


def train(model: nn.Module, rank: int, size: int) -> list[float]:
    """The loop of DistributedDataParallel: each rank with its slice of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        target = rows_of(rank, make_target(step, ROWS * size))
        loss = nn.functional.cross_entropy(model(**batch_of(rank, size, step)), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_under_ddp(rank: int, size: int) -> tuple[list[float], dict[str, Tensor]]:
    model = make_even_model()
    losses = train(nn.parallel.DistributedDataParallel(model), rank, size)
    return losses, model.state_dict()


def assert_near(losses: list[float], state: dict[str, Tensor], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-5, atol=1e-6)
    assert state.keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def two_ranks(rank: int, size: int, place: Path) -> None:
    """One line, on both ranks; the same numbers as DistributedDataParallel."""
    expected = train_under_ddp(rank, size)
    model = make_even_model()
    handle = mosaic.colocate(model, sample=batch_of(rank, size, 0))
    losses = train(model, rank, size)
    assert_near(losses, handle.full_state_dict(), expected)
    handle.remove()
    assert_near(losses, model.state_dict(), expected)


def one_of_two_ranks(rank: int, size: int, place: Path) -> None:
    """The text tower lives on rank 1 alone, by a plan; rows travel there and back."""
    join(rank, size, place)
    expected = train_under_ddp(rank, size)
    model = make_even_model()
    asked: dict[str, Any] = {"sample": batch_of(rank, size, 0), "modules": ("image", "text")}
    everywhere = mosaic.colocate(model, **asked, options=mosaic.Options(method="data-parallel"))
    everywhere.remove()
    path = place / f"plan{rank}.json"
    everywhere.plan.save(path)
    put_on(path, "text", [1])
    handle = mosaic.colocate(model, **asked, plan=path)
    assert all(one.is_meta for one in model.text.parameters()) == (rank == 0)
    losses = train(model, rank, size)
    assert any(name.startswith("sent_bytes") for name in handle.metrics())
    handle.remove()
    assert not any(one.is_meta for one in model.parameters())
    assert_near(losses, model.state_dict(), expected)


def put_on(path: Path, module: str, ranks: list[int]) -> None:
    """Edits a plan's file."""
    plan = json.loads(path.read_text())
    for stage in plan["stages"]:
        for placement in stage["placements"]:
            if placement["part"]["module"] == module:
                placement["grid"]["ranks"] = ranks
    path.write_text(json.dumps(plan))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    two_ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]))
    dist.destroy_process_group()
