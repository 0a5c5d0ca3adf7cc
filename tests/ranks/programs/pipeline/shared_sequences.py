"""Sequences that ranks share in pipelines, beside the plain loop; each function is one rank's program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mosaic
from mosaic.context import ContextSettings, MaskWords, causal
from mosaic.ranks.pipeline.handle import Pipeline
from ranks.begun import join
from ranks.programs.pipeline.trained import check_equal, llava, microbatch, options


def as_written(microbatch: Mapping[str, Any]) -> MaskWords:
    return causal(microbatch["input_ids"].shape[1])


def shared(**more: Any) -> ContextSettings:
    return ContextSettings(**{"ranks": 2, "mask": as_written, "block": 4, **more})


def steps() -> list[list[dict[str, Any]]]:
    """Ragged, some without images, lengths that are no whole blocks."""
    torch.manual_seed(5)
    return [[microbatch(count, 9 + count) for count in step] for step in ((2, 0, 3, 1), (1, 0, 4))]


def begun(make: Any = llava, **asked: Any) -> tuple[Pipeline, nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = make()
    plain = copy.deepcopy(model)
    given = {"trial": False, "options": options(), "context": shared(), **asked}
    return mosaic.pipeline(model, steps()[0], **given), model, plain


def of_two(rank: int, size: int, place: Path) -> None:
    """Two ranks share all sequences of LLaVA, with both exchanges, and its images where there are two or more."""
    join(rank, size, place)
    for settings in (shared(), shared(exchange="needed", method="zigzag")):
        pipe, model, plain = begun(context=settings)
        assert "2 ranks a sequence" in pipe.describe()
        encoded: list[int] = []
        layer = next(one for name, one in model.named_modules() if name.endswith("vision_tower.encoder.layers.0.mlp"))
        hook = layer.register_forward_pre_hook(
            lambda _, args, encoded=encoded: encoded.append(len(args[0])) if type(args[0]) is torch.Tensor else None
        )
        check_equal(pipe, model, plain, steps()[:1], ahead=True)
        hook.remove()
        assert set(encoded) == ({1, 2} if rank == 0 else {1}), encoded
        check_equal(pipe, model, plain, steps())
        losses = pipe.evaluate(steps()[1])
        pipe.remove()
        with torch.no_grad():
            own, other = ([one(**each).loss for each in steps()[1]] for one in (model, plain))
        assert torch.allclose(losses.double(), torch.stack(own).double(), rtol=1e-6)
        assert torch.allclose(torch.stack(own), torch.stack(other), rtol=1e-8)
    print("equal")


def of_four(rank: int, size: int, place: Path) -> None:
    """Two places whose layers two ranks have each; with backward for weights apart, layers made again, and tried."""
    join(rank, size, place)
    for asked in (
        {"options": options(partition="separated", weights="with")},
        {"options": options(partition="mixed-v", weights="apart"), "memory_bytes": 300_000},
        {"data": 2},
        {"trial": True},
    ):
        pipe, model, plain = begun(**asked)
        check_equal(pipe, model, plain, steps())
        pipe.remove()
    print("equal")
