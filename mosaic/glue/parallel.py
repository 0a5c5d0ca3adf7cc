"""Ranks of each module of a multimodal model (Cornstarch, section 3.2), as arguments of ``mosaic.pipeline``.

::

    specs = {"vision": Parallel(pipeline=1), "audio": Parallel(), "language_model": Parallel(pipeline=2)}
    pipe = mosaic.pipeline(model, sample, **parallelize(model, specs))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mosaic.context import CONTEXT_METHODS, ContextSettings, MaskWords, plan_context
from mosaic.context.attention import Attend, ContextBatch
from mosaic.errors import unknown
from mosaic.glue.folder import LANGUAGE_MODEL
from mosaic.glue.model import MultimodalModel
from mosaic.pipelining.cuts import on_own_ranks
from mosaic.pipelining.partition import Partition, Request

MaskOf = Callable[[Mapping[str, Any]], MaskWords]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The ranks of one module.

    Raises:
        ValueError: A number is below 1, or the method is unknown.
    """

    pipeline: int | None = None
    """Pipeline ranks of its layers; None: chosen by Cornstarch's Algorithm 1."""
    context: int = 1
    """Ranks that share each sequence; more than 1 for the language model alone. All pipeline ranks then have as many,
    and those of towers share whole items."""
    tensor: int = 1
    """Ranks that share each layer, on each of the module's pipeline ranks. Where modules differ in it, each needs a
    number as ``pipeline``."""
    data: int | None = None
    """Replicas; the same for all modules. None: as many as fit if every ``pipeline`` is a number, otherwise 1."""
    method: str = "lpt"
    """Load balancer of a sequence, one of ``mosaic.context``'s."""
    heads: int = 1
    """Number of key heads gathered at once."""
    block: int = 128
    """Tokens of a sequence that stay together."""

    def __post_init__(self) -> None:
        for name in ("pipeline", "context", "tensor", "data", "heads", "block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; use 1 or more")
        if self.method not in CONTEXT_METHODS:
            raise ValueError(unknown("method", self.method, CONTEXT_METHODS))

    def sequence(
        self, mask: MaskWords, group: ProcessGroup | None = None, *, device: torch.device | str = "cpu"
    ) -> ContextBatch:
        """Distributes a sequence over the context ranks of a group; see ``MultimodalModel.mask`` and ``embed``.

        ``device`` is the model's.

        Raises:
            ValueError: The sequence has fewer blocks than ranks.
            MosaicError: The size of the group differs, or the masks of its ranks do.
        """
        plan = plan_context(mask, ranks=self.context, method=self.method, block=self.block)
        return ContextBatch(attend=Attend(plan, group, heads=self.heads, device=device))


def parallelize(
    model: MultimodalModel, specs: Mapping[str, Parallel] | None = None, *, mask: MaskOf | None = None
) -> dict[str, Any]:
    """Returns the arguments with which ``mosaic.pipeline`` puts each module on ranks of its own.

    Args:
        model: The model.
        specs: By child, such as ``vision`` and ``language_model``, or of a tower that is a multimodal model itself by
            its children, such as ``speech.model.audio``; None: chosen by the planner.
        mask: Returns the attention mask of a microbatch whose sequence ranks share; by default ``model.mask`` of its
            ``input_ids``, causal.

    Raises:
        ValueError: A child is missing, a name is unknown, or a pipeline cannot do this.
    """
    if specs is None:
        return {"plan": partial(_on_own_ranks, pipeline={}, data=1)}
    children = [*_towers_of(model), LANGUAGE_MODEL]
    for name in (*children, *specs):
        if name not in children:
            raise ValueError(f"there is no module {name!r}; this model has {', '.join(children)}")
        if name not in specs:
            raise ValueError(f"there is no Parallel for {name!r}; add {name!r}: Parallel() to have its ranks chosen")
        if specs[name].context > 1 and name != LANGUAGE_MODEL:
            raise ValueError(
                f"context={specs[name].context} for {name!r}; only the language model shares sequences, and "
                "towers share items over the same ranks: use 1"
            )
    data = _common_data(specs)
    tensor = {name: own.tensor for name, own in specs.items()}
    pipeline = {name: own.pipeline for name, own in specs.items() if own.pipeline is not None}
    if len(set(tensor.values())) > 1 and (free := [name for name in children if name not in pipeline]):
        raise ValueError(
            f"modules have different numbers of tensor ranks ({tensor}), and {free[0]!r} has pipeline=None, whose "
            "ranks are chosen for equal ones alone; give it a number, or all modules the same tensor"
        )
    if data is None and len(pipeline) < len(children):
        data = 1
    own = specs[LANGUAGE_MODEL]
    plan = partial(_on_own_ranks, pipeline=pipeline, tensor=tensor, data=data, context=own.context)
    arguments = {"plan": plan, "data": data, "tensor": own.tensor if len(set(tensor.values())) == 1 else tensor}
    if own.context == 1:
        return arguments
    mask = mask or (lambda microbatch: model.mask(microbatch["input_ids"]))
    settings = ContextSettings(ranks=own.context, mask=mask, method=own.method, heads=own.heads, block=own.block)
    return arguments | {"context": settings}


def _on_own_ranks(
    request: Request,
    pipeline: Mapping[str, int],
    *,
    data: int | None,
    tensor: Mapping[str, int] = MappingProxyType({}),
    context: int = 1,
) -> Partition:
    """Returns the partition of one replica, whose modules have ranks of their own, some a fixed number (``pipeline``).

    With ``data=None`` a replica has as many ranks as ``pipeline`` says.
    """
    layers = {module.name: len(module.trains) for module in request.model.modules}
    asked, pipeline = pipeline, {}
    for child, count in asked.items():
        name = next((name for name in layers if f"{name}.".startswith(f"{child}.")), None)
        if name is None:
            raise ValueError(
                f"{child!r} has no list of layers to split over its own ranks; only {', '.join(layers)} have one: "
                f"pass modules={{{child!r}: 'name of its list'}} to mosaic.pipeline, or no specs"
            )
        pipeline[name] = count
        if count > layers[name]:
            raise ValueError(f"pipeline={count} for {name!r}, which has {layers[name]} layers; use {layers[name]}")
    fixed = sum(pipeline.values())
    degrees = set(tensor.values()) or {1}
    # mosaic.pipeline compares the ranks that are needed with those that are there.
    is_fixed = data is None or len(degrees) > 1
    num_ranks = fixed if is_fixed else request.num_ranks // ((data or 1) * max(degrees) * context)
    if len(pipeline) == len(layers) and fixed != num_ranks:
        raise ValueError(
            f"the modules have {fixed} ranks together, a replica {num_ranks} ({request.num_ranks} ranks, data={data}, "
            f"tensor={max(degrees)}, context={context}); give one of them pipeline=None, and it has the rest"
        )
    return on_own_ranks(replace(request, num_ranks=num_ranks), pipeline)


def _towers_of(model: MultimodalModel) -> list[str]:
    """Returns the names of a model's towers, and of the children of those that are multimodal models themselves."""
    names: list[str] = []
    for name, tower in model.towers.items():
        if isinstance(tower.model, MultimodalModel):
            names += [f"{name}.model.{child}" for child in (*_towers_of(tower.model), LANGUAGE_MODEL)]
        else:
            names.append(name)
    return names


def _common_data(specs: Mapping[str, Parallel]) -> int | None:
    """Returns the replicas of all modules; None values do not count."""
    values: set[int | None] = {own.data for own in specs.values()} - {None}
    if len(values) > 1:
        each = ", ".join(f"{name} {own.data}" for name, own in specs.items())
        raise ValueError(f"modules have different data ({each}); mosaic.pipeline needs the same for all of them")
    return next(iter(values), None)
