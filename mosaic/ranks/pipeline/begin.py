"""``mosaic.pipeline``: a model's layers on the ranks that torchrun started, in a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mosaic.artifact import fingerprint
from mosaic.engine.options import RankSettings
from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.pipelining.order.search import OrderLimits
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import PlannerOptions
from mosaic.pipelining.rank_space import RankSpace
from mosaic.ranks.meeting.devices import device_of
from mosaic.ranks.meeting.world import World
from mosaic.ranks.pipeline.chunk_work import Loss
from mosaic.ranks.pipeline.counting import count_model
from mosaic.ranks.pipeline.given import Plan, check_same_weights, degrees_of, partition_of
from mosaic.ranks.pipeline.handle import Pipeline
from mosaic.ranks.pipeline.rank_grid import RankGrids
from mosaic.ranks.pipeline.trial import Candidates, PipelineTrial, try_ways

DEFAULT_OPTIONS = PlannerOptions(limits=OrderLimits(seconds=1.0))


def pipeline(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    loss: Loss | None = None,
    modules: Mapping[str, str] | None = None,
    plan: Plan | None = None,
    data: int | None = None,
    options: PlannerOptions = DEFAULT_OPTIONS,
    memory_bytes: int = 0,
    trial: bool = True,
) -> Pipeline:
    """Puts a model's layers on the ranks that torchrun started; every rank calls it with the same model and sample.

    Finds the lists of layers, counts what they cost, plans which rank runs which, and gives up the memory of layers of
    other ranks. The model's class and its parameters' names stay.

    Args:
        model: The user's model, with the same weights on every rank, on the rank's device.
        sample: A microbatch with every modality, as keyword arguments of the model; or several, such as a step's.
        loss: Makes a number of the model's output and the microbatch; by default the output's ``loss``.
        modules: Names for lists of layers; found by default.
        plan: Where layers are: a partition, a schedule, or the file of one, as ``mosaic plan --pipeline`` writes it.
            Planned by default. Steps are planned as they come in any case.
        data: Replicas of the pipeline, which share each step's microbatches. By default as many as ``plan`` leaves
            ranks for; without a plan the trial compares one, as many as there are ranks, and numbers between.
        options: How steps are planned.
        memory_bytes: Of a rank's device; 0: no limit.
        trial: Whether the plan takes turns with others on the sample before the first step, and the fastest stays:
            1F1B over a mixed partition, and other numbers of replicas.

    Raises:
        UnsplittableError: The model cannot be cut; says where and why.
        InfeasibleError: Nothing fits in memory; says where and what would help.
        InvalidScheduleError: The plan is of another model, or its file was changed.
        ValueError: The ranks cannot be laid out so.
        BackendUnavailableError: There are no ranks, or they differ.
    """
    world = World.join(device_of(model), watch=RankSettings())
    with world.opening():
        steps = [sample] if isinstance(sample, Mapping) else list(sample)
        step = list(steps) * -(-2 * world.size // len(steps))
        candidates = make_candidates(
            model,
            step,
            world,
            loss=loss,
            modules=modules,
            plan=plan,
            data=data,
            options=options,
            memory_bytes=memory_bytes,
        )
        if candidates.partition is not None:
            found = PipelineTrial(best=candidates.given(candidates.partition))
        else:
            found = try_ways(candidates, step) if trial else PipelineTrial(best=candidates.planned())
        return Pipeline(candidates, found)


def make_candidates(
    model: nn.Module,
    step: Sequence[Mapping[str, Any]],
    world: World,
    *,
    loss: Loss | None = None,
    modules: Mapping[str, str] | None = None,
    plan: Plan | None = None,
    data: int | None = None,
    options: PlannerOptions = DEFAULT_OPTIONS,
    memory_bytes: int = 0,
) -> Candidates:
    """Finds a model's lists of layers and counts what they cost; arguments and errors as ``pipeline``'s, on every rank.

    ``step`` stands for the steps to come.
    """
    check_same_weights(model, world)
    split = find_split(model, step[0], modules=modules)
    cluster = find_cluster("host" if world.device.type == "cpu" else "h100-80g", max(2, world.size))
    counted = count_model(model, split, step[0], cluster.hardware)
    seen = [counted.microbatch(one) for one in step]
    request = Request(model=counted.model, num_ranks=world.size, microbatches=seen)
    partition = None if plan is None else partition_of(plan, request)
    degrees = degrees_of(world.size, data=data, partition=partition)
    world.check_same_plan(fingerprint((degrees, partition)), world.size)
    return Candidates(
        model=model,
        counted=counted,
        request=replace(request, num_ranks=degrees.pipeline),
        space=RankSpace(network=cluster, limit_bytes=memory_bytes),
        options=options,
        loss=loss or _own_loss,
        degrees=degrees,
        is_free=data is None,
        grids=RankGrids(world, split=repr(split.modules)),
        partition=partition,
    )


def _own_loss(output: Any, microbatch: Mapping[str, Any]) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None or loss.numel() != 1:
        raise ValueError(f"the model returned {type(output).__name__} without a loss; give pipeline(..., loss=...)")
    return loss
