"""A model on its ranks before its plan is settled: counted layers, the grid of ranks, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mosaic.artifact import fingerprint, load
from mosaic.backends.base import Backend
from mosaic.backends.table import open_backend
from mosaic.context.plan import ContextSettings
from mosaic.engine.options import RankSettings
from mosaic.errors import (
    BackendUnavailableError,
    InfeasibleError,
    InvalidPlanError,
    InvalidScheduleError,
    UnsplittableError,
)
from mosaic.find.restore import restored_objects
from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.baselines import BASELINES
from mosaic.pipelining.layers import AS_COUNTED, CountedMicrobatch, CountedModule, ModuleFit
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.plan import PipelinePlan, StepPlanner
from mosaic.pipelining.planner import AUTO, PlannerOptions, SharedStep, plan_baseline, plan_step, shares_of
from mosaic.pipelining.rank_hardware import Degrees, RankHardware
from mosaic.pipelining.schedule import PipelineSchedule, partition_of_schedule
from mosaic.pipelining.task_graph import RankSpace, gradient_sums_ms
from mosaic.ranks.pipeline.chunk_work import Loss, Microbatches
from mosaic.ranks.pipeline.counting import CountedModel, count_model
from mosaic.ranks.pipeline.lanes import backend_of, check_lanes
from mosaic.ranks.pipeline.rank_grid import RankGrids, positions
from mosaic.ranks.pipeline.sequences import Sequences
from mosaic.ranks.pipeline.tensor import TensorPlan, WeightSlices, share_layers
from mosaic.ranks.running import loops
from mosaic.ranks.world.groups import gpu_bytes
from mosaic.ranks.world.world import World

PLANNED = "planned"
"""Name of the plan that searches each step's order in one pipeline over all ranks, or in as many as were asked for."""
Plan = Partition | PipelineSchedule | PipelinePlan | str | Path | Callable[[Request], Partition]
DEFAULT_RANKS = RankSettings()
DEFAULT_PLANNING = PlannerOptions()
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class PipelineSetup:
    """The model on this rank, and what its plans are made from."""

    model: nn.Module
    """With the weights of all layers."""
    counted: CountedModel
    request: Request
    space: RankSpace
    options: PlannerOptions
    fitted: Mapping[str, ModuleFit] = field(default_factory=dict)
    """Measured times, which ``request`` has."""
    loss: Loss
    degrees: Degrees
    """The grid that is planned for."""
    is_free: bool
    """True if the number of replicas may change."""
    grids: RankGrids
    slices: WeightSlices | None = None
    """Slices of weights that tensor ranks share."""
    sequences: Sequences | None = None
    """Shares sequences over context ranks."""
    backend: Backend | None = None
    """None: this rank has no lanes."""
    partition: Partition | None = None
    """The user's; nothing is tried then."""

    @property
    def world(self) -> World:
        return self.grids.world

    def make(
        self,
        name: str,
        *,
        degrees: Degrees | None = None,
        baseline: str = "",
        options: PlannerOptions | None = None,
    ) -> StepPlanner | str:
        """Makes a plan on rank 0 for all, for the first replica's share; returns the reason where there is none."""
        grid, chosen = degrees or self.degrees, options or self.options
        request = replace(self.request, num_ranks=grid.pipeline)

        def planner() -> StepPlanner:
            share = shares_of(request, request.microbatches, grid.data)[0]
            step = [request.microbatches[at] for at in share]
            if baseline:
                planned = plan_baseline(baseline, request, step, space=self.space)
            else:
                planned = plan_step(request, step, space=self.space, options=chosen)
            machine = replace(self.counted.machine, degrees=grid)
            plan = PipelinePlan(
                name=name,
                baseline=baseline,
                degrees=grid,
                partition=planned.partition,
                fitted=self.fitted,
                predicted_ms=planned.makespan_ns / 1e6 + gradient_sums_ms(machine, request.model, planned.partition),
            )
            check_lanes(self.model, self.counted.split, plan)
            return StepPlanner(plan=plan, request=request, space=self.space, options=chosen)

        return self._planned(planner)

    def plan_sample(self, planner: StepPlanner, *, seconds: float | None = None) -> SharedStep | str:
        """Plans the sample's step on rank 0 for all; returns the reason where it cannot be planned."""
        return self._planned(lambda: planner.plan_step(planner.request.microbatches, seconds=seconds))

    def with_replicas(self, count: int) -> Degrees:
        """Returns the grid of so many replicas."""
        places = self.degrees.data * self.degrees.pipeline
        return replace(self.degrees, data=count, pipeline=places // count)

    def planned(self) -> StepPlanner:
        """Plans each step; raises InfeasibleError, on all ranks, where nothing fits."""
        planner = self.make(PLANNED)
        if isinstance(planner, str):
            raise InfeasibleError("the model cannot be planned on these ranks", reasons=[planner])
        return planner

    def planner_of(self, plan: Partition | PipelinePlan) -> StepPlanner:
        """Plans each step of a partition, or of an earlier start's plan with the times that were measured then."""
        if isinstance(plan, Partition):
            plan = PipelinePlan(name=PLANNED, degrees=self.degrees, partition=plan, fitted=self.fitted)
        setup = self.with_times(plan.fitted)
        request = replace(setup.request, num_ranks=plan.degrees.pipeline)
        if plan.baseline and (
            plan.baseline not in BASELINES or BASELINES[plan.baseline].cut(request) != plan.partition
        ):
            raise InvalidScheduleError(
                f"the plan's baseline is {plan.baseline!r}, which does not cut the model as its partition does; give a "
                "plan as it was kept, or one with an empty baseline"
            )
        return StepPlanner(plan=plan, request=request, space=setup.space, options=self.options)

    def with_times(self, fitted: Mapping[str, ModuleFit]) -> PipelineSetup:
        modules = [module for module in self.counted.model.modules if isinstance(module, CountedModule)]
        fit = tuple(replace(module, fit=fitted.get(module.name, AS_COUNTED)) for module in modules)
        request = replace(self.request, model=replace(self.counted.model, modules=fit))
        return replace(self, request=request, fitted=fitted)

    def cut(self, step: Microbatches) -> list[Mapping[str, Any]]:
        return list(step) if self.sequences is None else [self.sequences.cut(microbatch) for microbatch in step]

    def count(self, step: Microbatches) -> list[CountedMicrobatch]:
        return list(map(self.counted.microbatch, step))

    def _planned(self, plan: Callable[[], _T]) -> _T | str:
        result: _T | str = ""
        if self.world.rank == 0:
            try:
                result = plan()
            except (InfeasibleError, InvalidPlanError, ValueError) as error:
                result = str(error)
        return self.world.broadcast(result)  # type: ignore[no-any-return]


def check_arguments(**arguments: Any) -> None:
    """Raises TypeError for an argument of ``mosaic.pipeline`` that is of another type than its own."""
    for name, kind, needed in (
        ("model", nn.Module, "an nn.Module"),
        ("loss", Callable | None, "a function of the output and the microbatch"),
        ("modules", Mapping | None, "a dict such as {'text': 'model.layers'}"),
        ("data", int | None, "a number of replicas"),
        ("tensor", int | Mapping, "a number of ranks, or a dict with one for each list of layers"),
        ("tp_plan", Mapping | None, "a dict of styles by pattern"),
        ("context", ContextSettings | None, "mosaic.context.ContextSettings(...)"),
        ("options", PlannerOptions, "mosaic.PlannerOptions(...)"),
        ("memory_bytes", int, "a number of bytes"),
        ("ranks", RankSettings, "mosaic.RankSettings(...)"),
        ("trial", bool, "True or False"),
    ):
        if not isinstance(value := arguments[name], kind):  # type: ignore[arg-type]
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass {needed}")
    own = {id(parameter) for parameter in arguments["model"].parameters()}
    if not all(own.isdisjoint(parameters) for parameters in loops.handles.values()):
        raise ValueError("the model is in a pipeline, or colocated, already; call remove() of what has it first")


def make_setup(
    model: nn.Module,
    step: Microbatches,
    world: World,
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
    backend: Backend | None = None,
) -> PipelineSetup:
    """Finds a model's lists of layers, counts their costs and lays the ranks out; every rank calls it.

    ``step`` stands for the steps to come. Arguments and errors are those of ``mosaic.pipeline``.
    """
    check_same_weights(model, world)
    number = partial(_number, loss or _own_loss)
    split = find_split(model, step[0], modules=modules, loss=lambda output: number(output, step[0]))
    world_split = [f"{module.name} = {module.path or 'the model'} of {module.count} layers" for module in split.modules]
    _check_same(
        world,
        ", ".join(world_split),
        "the ranks found other lists of layers; give all ranks the same model, modules= and sample",
    )
    cluster = find_cluster("host" if world.device.type == "cpu" else "h100-80g", max(2, world.size))
    with unchanged_buffers(model):
        counted = count_model(model, split, step[0], RankHardware(cluster=cluster), offload=options.offload)
    if not counted.repeats:
        raise UnsplittableError(
            "the model gives other results when it is called again with the same microbatch: it keeps something of a "
            "call for the next one, and chunks call it more often, in another order: let the loop keep it, and pass it "
            "as an argument"
        )
    lanes = backend_of(world) if backend is None else open_backend(backend)
    slots = min(world.all_gather(1 if lanes is None else lanes.device.num_slots))
    request = _request(counted, step, world.size, slots)
    partition = None if plan is None else partition_of(plan, request)
    widths, sharing = _tensor_of(tensor, split), 1 if context is None else context.ranks
    degrees = degrees_of(world.size, data=data, tensor=widths, context=sharing, plan=plan, partition=partition)
    world.check_same_plan(fingerprint((degrees, partition)), world.size)
    grids = RankGrids(world)
    slices = None
    if degrees.tensor > 1:
        place = positions(degrees)[world.rank].place
        counted, slices = share_layers(
            model,
            counted,
            grids.tensor_group(degrees),
            world.progress,
            degrees=widths,
            own=partition.modules_on(place) if partition is not None and degrees.tensor_by_place else widths,
            plan=tp_plan,
            sample=step[0],
        )
    sequences = None
    if context is not None and context.ranks > 1:
        group = grids.context_group(degrees)
        sequences = Sequences(model, counted.split, context, group, device=world.device)
        with sequences.removed_on_error():
            sequences.check(step[0])
            step = list(map(sequences.cut, step))
        # Context ranks share units of encoders out, which they do in chunks of their own alone.
        counted = replace(counted, units_together=degrees.context)
        are_many = all(degrees.pipeline <= module.count for module in counted.split.modules)
        if options.partition == AUTO and are_many and counted.split.encoders:
            options = replace(options, partition="separated")
    return PipelineSetup(
        model=model,
        counted=counted,
        request=_request(counted, step, degrees.pipeline, slots),
        space=RankSpace(
            network=cluster,
            devices_per_rank=tuple(width * degrees.context for width in degrees.tensor_by_place)
            or degrees.tensor * degrees.context,
            limit_bytes=memory_bytes or gpu_bytes(world.device),
        ),
        options=options,
        loss=number,
        degrees=degrees,
        is_free=data is None,
        grids=grids,
        slices=slices,
        sequences=sequences,
        backend=lanes,
        partition=partition,
    )


def _request(counted: CountedModel, step: Microbatches, num_ranks: int, slots: int) -> Request:
    microbatches = list(map(counted.microbatch, step))
    return Request(model=counted.model, num_ranks=num_ranks, microbatches=microbatches, slots_per_rank=slots)


def _own_loss(output: Any, microbatch: Mapping[str, Any]) -> Any:
    return output if isinstance(output, Tensor) else getattr(output, "loss", None)


def _number(make_loss: Loss, output: Any, microbatch: Mapping[str, Any]) -> Tensor:
    loss = make_loss(output, microbatch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UnsplittableError(
            f"the loss of the model's {type(output).__name__} is a {kind}; give pipeline(..., loss=...) a function of "
            "output and microbatch that returns a tensor of one number"
        )
    return loss


def partition_of(plan: Plan, request: Request) -> Partition:
    """Returns the partition of a plan, or of the schedule in a file; refuses that of another model."""
    if isinstance(plan, str | Path):
        plan = load(PipelineSchedule, Path(plan))
    plan = plan.partition if isinstance(plan, PipelinePlan) else plan(request) if callable(plan) else plan
    if not isinstance(plan, Partition | PipelineSchedule):
        raise TypeError(f"plan={plan!r} is, or makes, a {type(plan).__name__}; pass a Partition or a PipelineSchedule")
    partition = plan if isinstance(plan, Partition) else partition_of_schedule(plan, request)
    try:
        partition.check_covers(request.model)
    except ValueError as error:
        raise InvalidScheduleError(f"the plan is of another model: {error}") from None
    return partition


def degrees_of(
    num_ranks: int,
    *,
    data: int | None,
    tensor: Mapping[str, int],
    context: int = 1,
    plan: Plan | None = None,
    partition: Partition | None,
) -> Degrees:
    """Returns the grid of ranks, with as many replicas as were asked for, or as a partition leaves ranks for."""
    least, most = min(tensor.values()), max(tensor.values())
    said = f"data={data}, tensor={most if least == most else dict(tensor)}"
    said += f", context={context}" if context > 1 else ""
    if partition is None:
        if least != most:
            raise ValueError(
                f"{said}: modules with other numbers of ranks need ranks of their own; give a plan that has them, as "
                "mosaic.glue.parallelize does"
            )
        if most < 1 or (data is not None and data < 1) or num_ranks % (most * context * (data or 1)):
            raise ValueError(f"{said}, and there are {num_ranks} ranks; use numbers whose product divides them")
        replicas = data or 1
        widths = (most,) * (num_ranks // (most * context * replicas))
    else:
        widths = tuple(_width_at(place, partition, tensor) for place in range(partition.num_ranks))
        needed = context * sum(widths)
        replicas = data or max(1, num_ranks // max(1, needed))
        if least < 1 or replicas < 1 or needed * replicas != num_ranks:
            raise ValueError(
                f"the plan is for {needed} ranks in each of {replicas} replicas, and there are {num_ranks} ({said}); "
                f"start {needed * replicas} ranks, or give another plan"
            )
    degrees = Degrees(
        data=replicas,
        pipeline=len(widths),
        tensor=most,
        context=context,
        tensor_by_place=() if least == most else widths,
    )
    then = plan.degrees if isinstance(plan, PipelinePlan) else degrees
    if (then.widths, then.context) != (degrees.widths, degrees.context):
        raise ValueError(
            f"the plan of an earlier start has {then.tensor} ranks a layer and {then.context} a sequence, and tensor= "
            f"and context= ask for {most} and {context}; give them as they were then"
        )
    return degrees


def _width_at(place: int, partition: Partition, tensor: Mapping[str, int]) -> int:
    own = {name: tensor[name] for name in partition.modules_on(place)}
    if len(set(own.values())) > 1:
        raise ValueError(f"rank {place} of the plan has modules with tensor={own}; give them one number, or ranks")
    return max(own.values(), default=max(tensor.values()))


def _tensor_of(tensor: int | Mapping[str, int], split: ModelSplit) -> dict[str, int]:
    """Returns the tensor ranks of each list of layers; a name may be that of a module with lists in it."""
    names = [module.name for module in split.modules]
    if isinstance(tensor, int):
        return dict.fromkeys(names, tensor)
    degrees = dict.fromkeys(names, 1)
    for name, degree in tensor.items():
        inside = [own for own in names if f"{own}.".startswith(f"{name}.")]
        if not inside:
            raise ValueError(f"tensor has {name!r}, which is no list of layers; there are {', '.join(names)}")
        if not isinstance(degree, int) or degree < 1:
            raise ValueError(f"tensor={degree!r} for {name!r}; use a number of 1 or more")
        degrees |= dict.fromkeys(inside, degree)
    return degrees


def check_same_weights(model: nn.Module, world: World) -> None:
    """Raises BackendUnavailableError, on all ranks, unless their models have the same weights."""
    tensors = (*model.parameters(), *model.buffers())
    there = [tensor.detach() for tensor in tensors if tensor.numel() and not tensor.is_meta]
    values = [torch.hash_tensor(tensor).view(torch.int64) for tensor in there]
    _check_same(
        world,
        fingerprint(torch.stack(values).tolist() if values else [])[:8],
        "the ranks' models have other weights; seed all ranks alike before the model is made, or load one file",
    )


def _check_same(world: World, own: str, message: str) -> None:
    gathered = world.all_gather(own)
    other = next((rank for rank, text in enumerate(gathered) if text != gathered[0]), None)
    if other is not None:
        raise BackendUnavailableError(
            message, found=f"{gathered[other]} on rank {other}", needed=f"{gathered[0]} as on rank 0"
        )


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """A block in which a model is run and then restored; changes to buffers of checkpoints are refused."""
    before = [
        (f"{path}.{name}" if path else name, module, name, buffer.detach().clone())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and name not in module._non_persistent_buffers_set
    ]
    with restored_objects(model):
        yield
        changed = [
            f"{path} of a {type(module).__name__}"
            for path, module, name, value in before
            if not _is_same(module._buffers.get(name), value)
        ]
    if changed:
        raise UnsplittableError(
            f"{changed[0]} changes with each forward, as running averages do; in a pipeline microbatches run in "
            "another order, on several replicas, and more often at the start: freeze it by eval() of its module, or "
            "let the loop change it between steps"
        )


def _is_same(tensor: torch.Tensor | None, other: torch.Tensor) -> bool:
    return tensor is not None and tensor.shape == other.shape and torch.equal(tensor.nan_to_num(), other.nan_to_num())
