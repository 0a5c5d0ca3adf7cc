"""``mosaic.pipeline``: a model's layers on the ranks that torchrun started, in a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mosaic.artifact import fingerprint
from mosaic.backends.base import Backend
from mosaic.context.plan import ContextSettings
from mosaic.engine.options import RankSettings
from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.pipelining.partition import Request
from mosaic.pipelining.plan import PipelinePlan
from mosaic.pipelining.planner import AUTO, PlannerOptions
from mosaic.pipelining.rank_hardware import Degrees, RankHardware
from mosaic.pipelining.task_graph import RankSpace
from mosaic.ranks.pipeline.chunk_work import Loss
from mosaic.ranks.pipeline.context.sequences import share_sequences
from mosaic.ranks.pipeline.counting import CountedModel, count_model
from mosaic.ranks.pipeline.grid.rank_grid import RankGrids
from mosaic.ranks.pipeline.handle import Pipeline
from mosaic.ranks.pipeline.options import (
    PipelineOptions,
    Plan,
    check_kept,
    check_same_split,
    check_same_weights,
    degrees_of,
    partition_of,
    unchanged_buffers,
)
from mosaic.ranks.pipeline.rank_lanes import backend_of
from mosaic.ranks.pipeline.tensor.share import share_layers
from mosaic.ranks.pipeline.tensor.slices import TensorPlan
from mosaic.ranks.pipeline.trying.setup import PipelineSetup
from mosaic.ranks.pipeline.trying.trial import PipelineTrial, try_plans
from mosaic.ranks.world.groups import device_of, gpu_bytes
from mosaic.ranks.world.world import World

DEFAULTS = PipelineOptions()


def pipeline(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    loss: Loss | None = None,
    modules: Mapping[str, str] | None = None,
    plan: Plan | None = None,
    data: int | None = None,
    tensor: int = 1,
    tp_plan: TensorPlan | None = None,
    context: ContextSettings | None = None,
    options: PlannerOptions = DEFAULTS.options,
    memory_bytes: int = 0,
    trial: bool = True,
    backend: Backend | None = None,
    ranks: RankSettings = DEFAULTS.ranks,
) -> Pipeline:
    """Puts a model's layers on the ranks that torchrun started; every rank calls it with the same model and sample.

    Finds the lists of layers, counts what they cost, plans which rank runs which, and gives up the memory of layers of
    other ranks. The model's class and its parameters' names stay.

    Args:
        model: The user's model, with the same weights on every rank, on the rank's device. One that is too large for
            that is on the meta device, with real buffers; ``load_weights`` then reads each rank's layers from files.
        sample: A microbatch with every modality, as keyword arguments of the model; or several, such as a step's.
        loss: Makes a number of the model's output and the microbatch; by default the output's ``loss``.
        modules: Names for lists of layers; found by default.
        plan: Where layers are: a partition, a schedule, or the file of one, as ``mosaic plan --pipeline`` writes it.
            Or a function that makes a partition for a request, as ``mosaic.glue.parallelize`` returns one. Planned by
            default. Steps are planned as they come in any case. Or what ``Pipeline.plan`` gave in an
            earlier start: then steps are run as in that one, if ``options`` have counted limits.
        data: Replicas of the pipeline, which share each step's microbatches. By default as many as ``plan`` leaves
            ranks for; without a plan the trial compares one, as many as there are ranks, and numbers between.
        tensor: Ranks that share each layer.
        tp_plan: For patterns of modules in layers, such as ``model.layers.*.mlp.up_proj``, how they are shared:
            ``colwise``, ``rowwise`` or ``replicated_with_grad_allreduce``; by default the ``tp_plan`` of a Hugging Face
            model. All others are whole on each rank.
        context: Has several ranks share each sequence of the language model, whose layers they all have; losses and
            gradients are the sums of their parts. A microbatch holds whole sequences as ever.
        options: How steps are planned.
        memory_bytes: Of a rank's device; 0: what a GPU has, and no limit on CPUs.
        trial: Whether the plan takes turns with others on the sample before the first step, and the fastest stays:
            1F1B over a mixed partition, encoders on lanes beside the backbone, and other numbers of replicas.
        backend: What a rank runs on, and shares out to its lanes; by default its GPU, or on the CPU its share of the
            machine's cores.
        ranks: How long ranks wait for each other, and how often they look after each other.

    Raises:
        UnsplittableError: The model cannot be cut, or a layer cannot be shared; says where and why.
        InfeasibleError: Nothing fits in memory; says where and what would help.
        InvalidScheduleError: The plan is of another model, or its file was changed.
        ValueError: The ranks cannot be laid out so.
        BackendUnavailableError: There are no ranks, or they differ.
    """
    given = PipelineOptions(
        loss=loss,
        modules=modules,
        plan=plan,
        data=data,
        tensor=tensor,
        tp_plan=tp_plan,
        context=context,
        options=options,
        memory_bytes=memory_bytes,
        backend=backend,
        ranks=ranks,
    )
    world = World.join(device_of(model), timeout_s=ranks.timeout_s, watch=ranks)
    with world.opening():
        steps = [sample] if isinstance(sample, Mapping) else list(sample)
        step = list(steps) * -(-2 * world.size // len(steps))
        candidates = make_setup(model, step, world, given)
        with nullcontext() if candidates.sequences is None else candidates.sequences.removed_on_error():
            return Pipeline(candidates, _found(candidates, step, plan, trial=trial))


def _found(
    candidates: PipelineSetup, step: Sequence[Mapping[str, Any]], plan: Plan | None, *, trial: bool
) -> PipelineTrial:
    if isinstance(plan, PipelinePlan):
        return PipelineTrial(best=candidates.kept(plan))
    if candidates.partition is not None:
        return PipelineTrial(best=candidates.given(candidates.partition))
    return try_plans(candidates, candidates.cut(step)) if trial else PipelineTrial(best=candidates.planned())


def make_setup(
    model: nn.Module, step: Sequence[Mapping[str, Any]], world: World, given: PipelineOptions = DEFAULTS
) -> PipelineSetup:
    """Finds a model's lists of layers, counts what they cost and lays the ranks out; every rank calls it.

    ``step`` stands for the steps to come. Errors are those of ``pipeline``.
    """
    check_same_weights(model, world)
    loss = given.loss or _own_loss
    split = find_split(model, step[0], modules=given.modules, loss=lambda output: loss(output, step[0]))
    check_same_split(split, world)
    cluster = find_cluster("host" if world.device.type == "cpu" else "h100-80g", max(2, world.size))
    with unchanged_buffers(model):
        counted = count_model(model, split, step[0], RankHardware(cluster=cluster))
    backend = given.backend or backend_of(world)
    slots = min(world.all_gather(1 if backend is None else backend.device.num_slots))
    request = _request(counted, step, world.size, slots)
    partition = None if given.plan is None else partition_of(given.plan, request)
    context = 1 if given.context is None else given.context.ranks
    degrees = degrees_of(world.size, data=given.data, tensor=given.tensor, context=context, partition=partition)
    check_kept(given.plan, degrees)
    world.check_same_plan(fingerprint((degrees, partition)), world.size)
    grids = RankGrids(world, split=repr(split.modules))
    slices = None
    if degrees.tensor > 1:
        counted, slices = share_layers(model, counted, grids, degree=degrees.tensor, plan=given.tp_plan, sample=step[0])
    sequences, options = None, given.options
    if given.context is not None and context > 1:
        group = grids.groups.of_context(degrees)
        sequences = share_sequences(model, counted.split, given.context, group, device=world.device, sample=step[0])
        step = [sequences.cut(one) for one in step]
        counted, options = _sharing_units(counted, options, degrees)
    return PipelineSetup(
        model=model,
        counted=counted,
        request=_request(counted, step, degrees.pipeline, slots),
        space=RankSpace(
            network=cluster,
            devices_per_rank=degrees.tensor * degrees.context,
            limit_bytes=given.memory_bytes or gpu_bytes(world.device),
        ),
        options=options,
        loss=loss,
        degrees=degrees,
        is_free=given.data is None,
        grids=grids,
        slices=slices,
        sequences=sequences,
        backend=backend,
        partition=partition,
    )


def _sharing_units(
    counted: CountedModel, options: PlannerOptions, degrees: Degrees
) -> tuple[CountedModel, PlannerOptions]:
    """Has planning know that context ranks share units of encoders out, which they do in chunks of their own alone."""
    counted = replace(counted, units_together=degrees.context)
    are_many = all(degrees.pipeline <= one.count for one in counted.split.modules)
    if options.partition == AUTO and are_many and counted.split.encoders:
        options = replace(options, partition="separated")
    return counted, options


def _request(counted: CountedModel, step: Sequence[Mapping[str, Any]], num_ranks: int, slots: int) -> Request:
    seen = [counted.microbatch(one) for one in step]
    return Request(model=counted.model, num_ranks=num_ranks, microbatches=seen, slots_per_rank=slots)


def _own_loss(output: Any, microbatch: Mapping[str, Any]) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None or loss.numel() != 1:
        raise ValueError(f"the model returned {type(output).__name__} without a loss; give pipeline(..., loss=...)")
    return loss
