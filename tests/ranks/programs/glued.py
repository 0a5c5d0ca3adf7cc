"""A glued model on four ranks with its sequences shared out, beside the plain model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import glued_models as cases
import torch

import mosaic
from mosaic.glue import MultimodalModel, Parallel, Tower, parallelize
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.planner import PlannerOptions
from ranks.begun import join
from ranks.programs.pipeline.trained import check_equal

OPTIONS = PlannerOptions(limits=OrderLimits(rollouts=50))


def doubled(given: dict[str, Any]) -> dict[str, Any]:
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, given
    )


def steps() -> list[list[dict[str, Any]]]:
    """Steps of microbatches, some without images."""
    return [[doubled(cases.batch(images, 0, rows=1)) for images in step] for step in ((3, 0, 2, 1), (1, 0, 4))]


def frozen() -> MultimodalModel:
    tower = Tower(cases.vision(), token=cases.IMAGE)
    return MultimodalModel(language_model=cases.language_model(), vision=tower).double().freeze("vision.model")


def over_sequences(rank: int, size: int, place: Path) -> None:
    """A frozen tower on two ranks that share its images, the language model on two that share its sequences."""
    join(rank, size, place)
    torch.manual_seed(1)
    model = frozen()
    plain = copy.deepcopy(model)
    trained = steps()
    specs = {"vision": Parallel(), "language_model": Parallel(context=2, block=4)}
    pipe = mosaic.pipeline(model, trained[0], options=OPTIONS, trial=False, **parallelize(model, specs))
    assert "2 ranks a sequence" in pipe.describe()
    assert model.language_model.lm_head.weight.is_meta == (rank < 2)
    check_equal(pipe, model, plain, trained, ahead=True)
    pipe.remove()
    print("equal")
