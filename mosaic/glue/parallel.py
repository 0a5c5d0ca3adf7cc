"""Ranks per module of a multimodal model (Cornstarch, section 3.2), as arguments of ``mosaic.pipeline``.

::

    specs = {"vision": Parallel(pipeline=1), "audio": Parallel(), "language_model": Parallel(pipeline=2)}
    pipe = mosaic.pipeline(model, sample, **parallelize(model, specs))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mosaic.context import ContextSettings
from mosaic.errors import unknown
from mosaic.glue.model import LANGUAGE_MODEL, MultimodalModel
from mosaic.pipelining.cuts import on_own_ranks
from mosaic.pipelining.partition import Partition, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The ranks of one module.

    Raises:
        ValueError: A number is below 1.
    """

    pipeline: int | None = None
    """Number of pipeline ranks; None: chosen by Cornstarch's Algorithm 1."""
    tensor: int = 1
    """Number of ranks that share each layer. If it differs between modules, each needs a number as ``pipeline``."""

    def __post_init__(self) -> None:
        for name, value in (("pipeline", self.pipeline), ("tensor", self.tensor)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; use 1 or more")


def parallelize(
    model: MultimodalModel,
    specs: Mapping[str, Parallel] | None = None,
    *,
    data: int | None = None,
    context: ContextSettings | None = None,
) -> dict[str, Any]:
    """Returns the arguments with which ``mosaic.pipeline`` places each module on ranks of its own.

    Args:
        model: The model.
        specs: Ranks by child, such as ``vision`` and ``language_model``, or by child of a tower that is a
            ``MultimodalModel``, such as ``speech.model.audio``; None: chosen by the planner.
        data: Number of replicas;
        None: as many as fit if every ``pipeline`` is a number, otherwise 1.
        context: Ranks that share each sequence of the language model. Ranks of towers then share whole items.

    Raises:
        ValueError: A child is missing, a name is unknown, or a pipeline does not support the ranks.
    """
    children = _children_of(model)
    specs = dict.fromkeys(children, Parallel()) if specs is None else specs
    for name in (*children, *specs):
        if name not in children:
            raise ValueError(unknown("module", name, children))
        if name not in specs:
            raise ValueError(f"specs has no Parallel for {name!r}; add {name!r}: Parallel() to choose its ranks")
    tensor = {name: own.tensor for name, own in specs.items()}
    pipeline = {name: own.pipeline for name, own in specs.items() if own.pipeline is not None}
    if len(set(tensor.values())) > 1 and (free := [name for name in children if name not in pipeline]):
        raise ValueError(
            f"modules have different numbers of tensor ranks ({tensor}), but {free[0]!r} has pipeline=None, which "
            "needs equal ones; set it to a number, or use the same tensor for all modules"
        )
    if data is None and len(pipeline) < len(children):
        data = 1
    num_context = 1 if context is None else context.ranks
    plan = partial(_on_own_ranks, pipeline=pipeline, tensor=tensor, data=data, context=num_context)
    degree = tensor[LANGUAGE_MODEL] if len(set(tensor.values())) == 1 else tensor
    return {"plan": plan, "data": data, "tensor": degree, "context": context}


def _on_own_ranks(
    request: Request, *, pipeline: Mapping[str, int], tensor: Mapping[str, int], data: int | None, context: int
) -> Partition:
    """Returns the partition of one replica with separate ranks per module, some of a fixed number (``pipeline``).

    With ``data=None`` a replica has the ranks of ``pipeline``.
    """
    layers = {module.name: len(module.trains) for module in request.model.modules}
    ranks_of: dict[str, int] = {}
    for child, count in pipeline.items():
        name = next((name for name in layers if f"{name}.".startswith(f"{child}.")), None)
        if name is None:
            raise ValueError(
                f"{child!r} has no list of layers to split over ranks; only {', '.join(layers)} have one: "
                f"pass modules={{{child!r}: 'name of its list'}} to mosaic.pipeline, or no specs"
            )
        ranks_of[name] = count
        if count > layers[name]:
            raise ValueError(f"pipeline={count} for {name!r}, which has {layers[name]} layers; use {layers[name]}")
    fixed = sum(ranks_of.values())
    degrees = set(tensor.values())
    # mosaic.pipeline checks the number of ranks
    is_fixed = data is None or len(degrees) > 1
    num_ranks = fixed if is_fixed else request.num_ranks // ((data or 1) * max(degrees) * context)
    if len(ranks_of) == len(layers) and fixed != num_ranks:
        raise ValueError(
            f"the modules have {fixed} ranks together, a replica {num_ranks} ({request.num_ranks} ranks, data={data}, "
            f"tensor={max(degrees)}, context={context}); set pipeline=None for one of them to assign it the others"
        )
    return on_own_ranks(replace(request, num_ranks=num_ranks), ranks_of)


def _children_of(model: MultimodalModel, prefix: str = "") -> list[str]:
    """Returns the names of a model's children; for a tower that is a ``MultimodalModel``, those of its children."""
    names = []
    for name, tower in model.towers.items():
        inner, own = tower.model, f"{prefix}{name}"
        names += _children_of(inner, f"{own}.model.") if isinstance(inner, MultimodalModel) else [own]
    return [*names, f"{prefix}{LANGUAGE_MODEL}"]
