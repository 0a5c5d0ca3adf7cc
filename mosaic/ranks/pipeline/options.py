"""The arguments of ``mosaic.pipeline``, and checks of them: equal weights on all ranks, plans, numbers of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mosaic.artifact import fingerprint, load
from mosaic.backends.base import Backend
from mosaic.context.plan import ContextSettings
from mosaic.engine.options import RankSettings
from mosaic.errors import BackendUnavailableError, InvalidScheduleError, UnsplittableError
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.plan import PipelinePlan
from mosaic.pipelining.planner import PlannerOptions
from mosaic.pipelining.rank_hardware import Degrees
from mosaic.pipelining.schedule import PipelineSchedule, partition_of_schedule
from mosaic.ranks.pipeline.chunk_work import Loss
from mosaic.ranks.pipeline.tensor.slices import TensorPlan
from mosaic.ranks.world.world import World

Plan = Partition | PipelineSchedule | PipelinePlan | str | Path | Callable[[Request], Partition]
DEFAULT_RANKS = RankSettings()
DEFAULT_OPTIONS = PlannerOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The arguments of ``mosaic.pipeline`` beside model and sample; it says what they are."""

    loss: Loss | None = None
    """Makes a number of the model's output."""
    modules: Mapping[str, str] | None = None
    """Names for lists of layers."""
    plan: Plan | None = None
    """Where layers are."""
    data: int | None = None
    """Replicas."""
    tensor: int = 1
    """Ranks that share each layer."""
    tp_plan: TensorPlan | None = None
    """How they are shared."""
    context: ContextSettings | None = None
    """How sequences are shared."""
    options: PlannerOptions = DEFAULT_OPTIONS
    """How steps are planned."""
    memory_bytes: int = 0
    """Of a rank's device."""
    backend: Backend | None = None
    """What a rank runs on."""
    ranks: RankSettings = DEFAULT_RANKS
    """How ranks watch each other."""


def partition_of(plan: Plan, request: Request) -> Partition:
    """Returns where a plan has a model's layers.

    Raises:
        InvalidScheduleError: It is of another model; names both.
        InvalidFileError: The file is no schedule.
    """
    if isinstance(plan, str | Path):
        plan = load(PipelineSchedule, Path(plan))
    plan = plan.partition if isinstance(plan, PipelinePlan) else plan(request) if callable(plan) else plan
    partition = plan if isinstance(plan, Partition) else partition_of_schedule(plan, request)
    try:
        partition.check_covers(request.model)
    except ValueError as error:
        raise InvalidScheduleError(f"the plan is of another model: {error}") from None
    return partition


def degrees_of(
    num_ranks: int, *, data: int | None, tensor: int, context: int = 1, partition: Partition | None
) -> Degrees:
    """Returns how ranks are laid out: as many replicas as were asked for, or as a partition leaves ranks for.

    Raises:
        ValueError: They cannot be.
    """
    shared = tensor * context
    said = f"data={data}, tensor={tensor}" + (f", context={context}" if context > 1 else "")
    if tensor < 1 or (data is not None and data < 1) or num_ranks % (shared * (data or 1)):
        raise ValueError(f"{said}, and there are {num_ranks} ranks; use numbers whose product divides them")
    places = num_ranks // (shared * (data or 1)) if partition is None else partition.num_ranks
    replicas = data or (1 if partition is None else max(1, num_ranks // (shared * places)))
    if replicas * places * shared != num_ranks:
        raise ValueError(
            f"the plan is for {places} ranks, and {num_ranks} with {said} are not {places} each; "
            f"start {replicas * places * shared} ranks, or give another plan"
        )
    return Degrees(data=replicas, pipeline=places, tensor=tensor, context=context)


def check_kept(plan: Plan | None, degrees: Degrees) -> None:
    """Raises ValueError if a way that was kept shares layers or sequences with other numbers of ranks."""
    if isinstance(plan, PipelinePlan) and (plan.degrees.tensor, plan.degrees.context) != (
        degrees.tensor,
        degrees.context,
    ):
        raise ValueError(
            f"the way that was kept has {plan.degrees.tensor} ranks a layer and {plan.degrees.context} a sequence, and "
            f"tensor= and context= ask for {degrees.tensor} and {degrees.context}; give them as they were then"
        )


def check_same_weights(model: nn.Module, world: World) -> None:
    """Raises BackendUnavailableError, on all ranks, unless their models have the same weights."""
    tensors = (*model.parameters(), *model.buffers())
    values = [torch.hash_tensor(one.detach()).view(torch.int64) for one in tensors if one.numel() and not one.is_meta]
    told = world.all_gather(fingerprint(torch.stack(values).tolist() if values else []))
    other = next((rank for rank, found in enumerate(told) if found != told[0]), None)
    if other is not None:
        raise BackendUnavailableError(
            "the ranks' models have other weights; seed all ranks alike before the model is made, or load one file",
            found=f"{told[other][:8]} on rank {other}",
            needed=f"{told[0][:8]} as on rank 0",
        )


def check_same_split(split: ModelSplit, world: World) -> None:
    """Raises BackendUnavailableError, on all ranks, unless they cut their models alike."""
    told = world.all_gather([f"{one.name} = {one.path or 'the model'} of {one.count} layers" for one in split.modules])
    other = next((rank for rank, found in enumerate(told) if found != told[0]), None)
    if other is not None:
        raise BackendUnavailableError(
            "the ranks found other lists of layers; give all ranks the same model, modules= and sample",
            found=f"{', '.join(told[other])} on rank {other}",
            needed=f"{', '.join(told[0])} as on rank 0",
        )


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """A block in which a model is run; its buffers are put back.

    Raises:
        UnsplittableError: One that belongs into checkpoints was changed, such as a running average: a step runs
            microbatches in another order than the plain loop, replicas each run some of them, and the trial many more.
    """
    before = [
        (f"{path}.{name}" if path else name, module, name, buffer, buffer.detach().clone())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and name not in module._non_persistent_buffers_set
    ]
    changed = []
    try:
        yield
        changed = [
            f"{path} of a {type(module).__name__}"
            for path, module, name, _, value in before
            if not _is_same(module._buffers.get(name), value)
        ]
    finally:
        with torch.no_grad():
            for _, module, name, buffer, value in before:
                module._buffers[name] = buffer.copy_(value)
    if changed:
        raise UnsplittableError(
            f"{changed[0]} changes with each forward, as running averages do; in a pipeline microbatches run in "
            "another order, on several replicas, and more often at the start: freeze it by eval() of its module, or "
            "let the loop change it between steps"
        )


def _is_same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
