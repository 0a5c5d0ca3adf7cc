"""``mosaic.pipeline``: runs a model's layers in a pipeline on the ranks of torchrun."""

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
    """Distributes a model's layers over the ranks of torchrun; every rank passes the same model and sample.

    Finds the lists of layers, counts their costs, plans the layers of each rank, and releases the memory of other
    ranks' layers. The model's class and the names of its parameters do not change.

    Args:
        model: The user's model, with the same weights on every rank, on the rank's device. If it is too large, on the
            meta device with real buffers; ``load_weights`` then reads each rank's layers from files.
        sample: A microbatch with every modality, as keyword arguments of the model, or several, such as a step's.
        loss: Maps the model's output and the microbatch to a scalar; by default the output's ``loss``.
        modules: Names of the lists of layers; by default found by tracing.
        plan: The layers of each rank, by default planned: a partition, a schedule or its file (of ``mosaic plan
            --pipeline``), or a function of a request, as in ``mosaic.glue.parallelize``. Steps are planned in any case;
            with an earlier ``Pipeline.plan`` as in that run if ``options`` have counted limits.
        data: Number of replicas, which share each step's microbatches. By default as many as ``plan`` has ranks for;
            without a plan the trial compares one, one per rank, and numbers between.
        tensor: Number of ranks that share each layer, or numbers by list of layers (by default 1). Lists with different
            numbers need their own ranks in ``plan``.
        tp_plan: Styles by pattern of modules in layers, such as ``model.layers.*.mlp.up_proj``: ``colwise``,
            ``rowwise`` or ``replicated_with_grad_allreduce``; by default the ``tp_plan`` of a Hugging Face model. Other
            modules are replicated.
        context: Context parallelism of the language model; losses and gradients are sums over ranks.
        options: Settings of planning.
        memory_bytes: Memory of a rank's device; 0: all of a GPU's, unlimited on CPUs.
        trial: Compare the plan, 1F1B over a mixed partition, encoders on lanes beside the backbone, and other numbers
            of replicas on the sample before the first step; the fastest is used.
        backend: Device of a rank's lanes; by default its GPU or its share of the machine's cores.
        ranks: Timeouts and heartbeats of ranks.

    Raises:
        UnsplittableError: The model cannot be cut, or a layer cannot be shared; has the place and the reason.
        InfeasibleError: No plan fits into memory; has the rank and a remedy.
        InvalidScheduleError: The plan is for another model, or its file was changed.
        ValueError: The ranks cannot be arranged like this.
        BackendUnavailableError: The process is not a rank of torchrun, or ranks differ.
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
    check_arguments(model=model, ranks=ranks, trial=trial, **arguments)
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
