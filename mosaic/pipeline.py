"""``mosaic.pipeline``: a model's layers on the ranks that torchrun started, in a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from mosaic.backends.base import Backend
from mosaic.context.plan import ContextSettings
from mosaic.engine.options import RankSettings
from mosaic.parts.blank import without_fast_paths
from mosaic.pipelining.plan import PipelinePlan
from mosaic.pipelining.planner import PlannerOptions
from mosaic.ranks.pipeline.chunk_work import Loss
from mosaic.ranks.pipeline.handle import Pipeline
from mosaic.ranks.pipeline.setup import DEFAULT_PLANNING, DEFAULT_RANKS, Plan, check_arguments, make_setup
from mosaic.ranks.pipeline.step import listed
from mosaic.ranks.pipeline.tensor import TensorPlan
from mosaic.ranks.pipeline.trial import PipelineTrial, try_plans
from mosaic.ranks.world.groups import device_of
from mosaic.ranks.world.world import World


def pipeline(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    loss: Loss | None = None,
    modules: Mapping[str, str] | None = None,
    plan: Plan | None = None,
    data: int | None = None,
    tensor: int | Mapping[str, int] = 1,
    tp_plan: TensorPlan | None = None,
    context: ContextSettings | None = None,
    options: PlannerOptions = DEFAULT_PLANNING,
    memory_bytes: int = 0,
    trial: bool = True,
    backend: Backend | None = None,
    ranks: RankSettings = DEFAULT_RANKS,
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
        plan: Where layers are, planned by default: a partition, a schedule, or the file of one, as
            ``mosaic plan --pipeline`` writes it; or a function of a request, as ``mosaic.glue.parallelize`` makes one.
            Steps are planned in any case; with an earlier ``Pipeline.plan`` as then if ``options`` have counted limits.
        data: Replicas of the pipeline, which share each step's microbatches. By default as many as ``plan`` leaves
            ranks for; without a plan the trial compares one, as many as there are ranks, and numbers between.
        tensor: Ranks that share each layer; or a number for each list of layers, by name, with 1 for the others. Lists
            with different numbers need ranks of their own in ``plan``.
        tp_plan: For patterns of modules in layers, such as ``model.layers.*.mlp.up_proj``, how they are shared:
            ``colwise``, ``rowwise`` or ``replicated_with_grad_allreduce``; by default the ``tp_plan`` of a Hugging Face
            model. All others are whole on each rank.
        context: Ranks that share each sequence of the language model; losses and gradients are sums of their parts.
        options: Settings of planning.
        memory_bytes: Memory of a rank's device; 0 is all of a GPU's, and no limit on CPUs.
        trial: Try the plan, 1F1B over a mixed partition, encoders on lanes beside the backbone, and other numbers of
            replicas in turn on the sample before the first step; the fastest stays.
        backend: Device of a rank's lanes; by default its GPU, or its share of the machine's cores.
        ranks: Timeouts and heartbeats of ranks.

    Raises:
        UnsplittableError: The model cannot be cut, or a layer cannot be shared; says where and why.
        InfeasibleError: Nothing fits in memory; says where and what would help.
        InvalidScheduleError: The plan is of another model, or its file was changed.
        ValueError: The ranks cannot be laid out so.
        BackendUnavailableError: There are no ranks, or they differ.
    """
    arguments: dict[str, Any] = {
        "loss": loss,
        "modules": modules,
        "plan": plan,
        "data": data,
        "tensor": tensor,
        "tp_plan": tp_plan,
        "context": context,
        "options": options,
        "memory_bytes": memory_bytes,
        "backend": backend,
    }
    check_arguments(model=model, ranks=ranks, **arguments)
    world = World.join(device_of(model), ranks)
    with world.opening(), without_fast_paths():
        microbatches = listed([sample] if isinstance(sample, Mapping) else sample)
        step = microbatches * -(-2 * world.size // len(microbatches))
        setup = make_setup(model, step, world, **arguments)
        with nullcontext() if setup.sequences is None else setup.sequences.removed_on_error():
            if setup.partition is not None:
                chosen_plan = plan if isinstance(plan, PipelinePlan) else setup.partition
                tried = PipelineTrial(best=setup.planner_of(chosen_plan))
            else:
                tried = try_plans(setup, setup.cut(step)) if trial else PipelineTrial(best=setup.planned())
            return Pipeline(setup, tried)
