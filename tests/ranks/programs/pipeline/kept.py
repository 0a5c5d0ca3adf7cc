"""A plan kept for a later start, as it was and changed; each function is one rank's program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mosaic
from mosaic.artifact import load, save
from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.partition import Chunk, Part, Partition
from mosaic.pipelining.plan import PipelinePlan
from mosaic.ranks.pipeline.handle import Pipeline
from ranks.begun import in_turn
from ranks.programs.pipeline.trained import options

TOO_LITTLE = 1200
"""Bytes; for all layers on each rank."""


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))


class Layered(nn.Module):
    """A tower and a backbone, with dropout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.tower, self.backbone = (nn.ModuleList(layer() for _ in range(2)) for _ in range(2))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        for layer in self.tower:
            left = layer(left).tanh()
        x = left + right
        for layer in self.backbone:
            x = layer(x).tanh()
        return x


def microbatch(rows: int) -> dict[str, Tensor]:
    return {"left": torch.randn(rows, 4), "right": torch.randn(rows, 4)}


def again(rank: int, size: int, place: Path) -> None:
    """A trial's plan gives the same bits after a file, and so does its partition when each step is planned.

    A baseline whose own cut is another would leave tasks out: losses were 0, and gradients missing.
    """
    torch.manual_seed(3)
    steps = [[microbatch(rows) for rows in step] for step in ((3, 3, 2), (1, 4, 4))]

    def begun(plan: PipelinePlan | None) -> Pipeline:
        asked = {"plan": plan, "memory_bytes": TOO_LITTLE, "options": options()}
        return mosaic.pipeline(Layered(), steps[0], loss=lambda output, _: output.square().mean(), **asked)

    def gradients_of(pipe: Pipeline) -> list[Tensor]:
        for step in steps:
            torch.manual_seed(7)
            pipe.step(step)
        gradients = [one.grad for one in pipe.parameters() if one.grad is not None]
        pipe.remove(gather=False)
        return gradients

    tried = begun(None)
    first, plan = gradients_of(tried), tried.plan
    path = place / f"kept{rank}.json"
    save(plan, path)
    assert load(PipelinePlan, path) == plan
    assert plan.degrees.pipeline == size
    check_equal(first, gradients_of(begun(load(PipelinePlan, path))))
    check_equal(*(gradients_of(begun(replace(plan, baseline=""))) for _ in range(2)))
    with pytest.raises(InvalidScheduleError, match="baseline is 'megatron', which does not cut the model as"):
        begun(replace(plan, baseline="megatron", partition=in_two(plan.partition)))


def in_two(partition: Partition) -> Partition:
    """A list of layers on each rank, whole."""
    parts = (Part(module=name, first=0, count=2, total=2) for name in ("tower", "backbone"))
    chunks = tuple(Chunk(parts=(part,), rank=rank) for rank, part in enumerate(parts))
    return replace(partition, chunks=chunks)


def check_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


on_two_ranks = in_turn(again)
