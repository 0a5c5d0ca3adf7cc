"""How each module of a glued model is spread over ranks (Cornstarch, section 3.2), and what ``mosaic.pipeline`` takes.

::

    specs = {"vision": Parallel(pipeline=1), "audio": Parallel(), "language_model": Parallel(pipeline=2)}
    pipe = mosaic.pipeline(model, sample, **parallelize(model, specs))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import ProcessGroup

from mosaic.context import CONTEXT_METHODS, ContextSettings, MaskWords, plan_context
from mosaic.context.attention import Attend, ContextBatch
from mosaic.glue.glue import Glue
from mosaic.glue.record import LANGUAGE_MODEL
from mosaic.pipelining.partition.parallel import on_own_ranks
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request

MaskOf = Callable[[Mapping[str, Any]], MaskWords]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The ranks of one module.

    Raises:
        ValueError: A number is below 1, or there is no such method.
    """

    pipeline: int | None = None
    """Ranks that have its layers, one after the other; None: found by Cornstarch's Algorithm 1."""
    context: int = 1
    """Ranks that share each sequence; more than 1 for the language model alone. All places of the pipeline then have
    as many, and those of towers share whole items out."""
    tensor: int = 1
    """Ranks that share each layer; the same for all modules."""
    data: int | None = None
    """Replicas; the same for all modules. None: as many as there are ranks for where every ``pipeline`` is given,
    otherwise 1."""
    method: str = "lpt"
    """How a sequence is shared out, one of ``mosaic.context``'s."""
    heads: int = 1
    """Of keys, how many are gathered together."""
    block: int = 128
    """Tokens of a sequence that stay together."""

    def __post_init__(self) -> None:
        for name in ("pipeline", "context", "tensor", "data", "heads", "block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; use 1 or more")
        if self.method not in CONTEXT_METHODS:
            raise ValueError(f"method={self.method!r} shares no sequences out; use one of {', '.join(CONTEXT_METHODS)}")

    def sequence(self, mask: MaskWords, group: ProcessGroup | None = None) -> ContextBatch:
        """Shares a sequence out over the context ranks of a group; see ``Glue.mask`` and ``Glue.embed``.

        Raises:
            ValueError: The sequence has fewer blocks than there are ranks.
            MosaicError: The group has another size, or its ranks have other masks.
        """
        plan = plan_context(mask, ranks=self.context, method=self.method, block=self.block)
        return ContextBatch(attend=Attend(plan, group, heads=self.heads))


def parallelize(
    model: Glue, specs: Mapping[str, Parallel] | None = None, *, mask: MaskOf | None = None
) -> dict[str, Any]:
    """Returns the arguments with which ``mosaic.pipeline`` puts each module on ranks of its own.

    Args:
        model: Whose children are spread.
        specs: By child, such as ``vision`` and ``language_model``; None: all is found.
        mask: Who sees whom in a microbatch, where ranks share its sequence; by default ``model.mask`` of its
            ``input_ids``, causal.

    Raises:
        ValueError: A child is missing, a name is strange, or something is asked that pipelines cannot do.
    """
    if specs is None:
        return {"plan": OwnRanks(pipeline={}, data=1, tensor=1)}
    children = [*model.tower_names, LANGUAGE_MODEL]
    for name in (*children, *specs):
        if name not in children:
            raise ValueError(f"there is no module {name!r}; this model has {', '.join(children)}")
        if name not in specs:
            raise ValueError(f"there is no Parallel for {name!r}; give {name!r}: Parallel(), of which all is found")
        if specs[name].context > 1 and name != LANGUAGE_MODEL:
            raise ValueError(
                f"context={specs[name].context} for {name!r}; sequences of the language model alone are shared out, "
                "and towers' items over the same ranks: use 1"
            )
    data, tensor = (_common(specs, axis) for axis in ("data", "tensor"))
    pipeline = {name: own.pipeline for name, own in specs.items() if own.pipeline is not None}
    if data is None and len(pipeline) < len(children):
        data = 1
    own = specs[LANGUAGE_MODEL]
    plan = OwnRanks(pipeline=pipeline, data=data, tensor=tensor or 1, context=own.context)
    found = {"plan": plan, "data": data, "tensor": plan.tensor}
    if own.context == 1:
        return found
    mask = mask or (lambda microbatch: model.mask(microbatch["input_ids"]))
    settings = ContextSettings(ranks=own.context, mask=mask, method=own.method, heads=own.heads, block=own.block)
    return found | {"context": settings}


@dataclass(frozen=True, kw_only=True)
class OwnRanks:
    """Makes a partition, when the model's layers are counted: modules on ranks of their own."""

    pipeline: Mapping[str, int]
    """Ranks of the modules that have them given."""
    data: int | None
    """Replicas of all; None: one of as many ranks as ``pipeline`` says."""
    tensor: int
    """Ranks that share each layer."""
    context: int = 1
    """Ranks that share each sequence."""

    def __call__(self, request: Request) -> Partition:
        """Returns the partition of one replica.

        Raises:
            ValueError: There are more ranks or fewer than asked for, or a module is none of those that can be cut.
        """
        found = {module.name: len(module.trains) for module in request.model.modules}
        for name, count in self.pipeline.items():
            if name not in found:
                raise ValueError(
                    f"{name!r} has no one list of layers, so that it has no ranks of its own; lists were found of "
                    f"{', '.join(found)}: give mosaic.pipeline modules={{{name!r}: 'name of its list'}}, or no specs"
                )
            if count > found[name]:
                raise ValueError(f"pipeline={count} for {name!r}, which has {found[name]} layers; use {found[name]}")
        given, shared = sum(self.pipeline.values()), self.tensor * self.context
        num_ranks = given if self.data is None else request.num_ranks // (self.data * shared)
        if len(self.pipeline) == len(found) and given != num_ranks:
            raise ValueError(
                f"the modules have {given} ranks together, a replica {num_ranks} ({request.num_ranks} ranks, "
                f"data={self.data}, tensor={self.tensor}, context={self.context}); give one of them pipeline=None, and "
                "it has the rest"
            )
        return on_own_ranks(replace(request, num_ranks=num_ranks), self.pipeline)


def _common(specs: Mapping[str, Parallel], axis: str) -> int | None:
    """Returns what all modules have; ``data`` may be left to one of them."""
    found: set[int | None] = {getattr(own, axis) for own in specs.values()} - {None}
    if len(found) > 1:
        each = ", ".join(f"{name} {getattr(own, axis)}" for name, own in specs.items())
        raise ValueError(
            f"modules have different {axis} ({each}); mosaic.pipeline shares all of them out alike: give them one"
        )
    return next(iter(found), None)
