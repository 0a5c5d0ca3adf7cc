"""Plans of several planners measured on these ranks, each in turn with data-parallel training on the same ranks.

Every rank calls this with a function that makes the same model. The baseline is torch's own DDP over the same process
group's ranks, in the same processes, with the same threads, on the same slices of the batch: rounds of its steps and
of the colocated loop's take turns, so that a drift of the machine hits both. A step ends with its slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.plan import Plan
from mosaic.profiler import ForeignLoad, ProfileSettings, measure_ring, measure_route
from mosaic.ranks.choosing.planning import cost_of_ranks, profile_of_all
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.running.prepare import cores_of_rank, prepare
from mosaic.ranks.world.world import World
from mosaic.solver.methods import compared_methods
from mosaic.solver.runnable import plan_to_run
from mosaic.take_turns import take_turns

COMPARED = compared_methods()
"""Methods that are compared unless others are named."""


class Trained(Protocol):
    """A model that trains on one batch; ``loss`` makes a scalar of the model's output."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def sample(self) -> Any: ...
    @property
    def loss(self) -> Callable[[Any], torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The extent of a measurement."""

    rounds: int = 4
    """Rounds in which both take turns; 1 or more."""
    steps: int = 5
    """Steps of each in a round."""
    warm_steps: int = 2
    """Steps of each before anything counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMethod:
    """The measurements of one method's plan."""

    method: str
    plan: Plan | None = None
    """The plan that ran; None where the method made none."""
    same_as: str = ""
    """An earlier method whose plan is the same, so that its measurements are these; empty where there is none."""
    reason: str = ""
    """The reason for no plan."""
    step_ms: tuple[float, ...] = ()
    """Steps of the colocated loop, of the slowest rank each, in milliseconds."""
    ddp_ms: tuple[float, ...] = ()
    """Steps of data-parallel training in between."""
    ratios: tuple[float, ...] = ()
    """For each round the median step over data-parallel training's."""
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes that all ranks together sent in a step, by phase: forward, backward, reduce."""
    held_bytes: tuple[int, ...] = ()
    """Parameters, gradients and optimizer state, by rank."""
    ddp_held_bytes: tuple[int, ...] = ()
    foreign_cpu_share: float | None = None
    """Share of the first rank's node's CPU time that processes took that belong to no rank; None where unknown."""

    @property
    def predicted_ms(self) -> float | None:
        """Predicted step of the plan's modules, in milliseconds; without optimizer, loss and what lies between."""
        return None if self.plan is None else self.plan.predicted_ms


def compare_plans(
    make: Callable[[], Trained],
    methods: Sequence[str] = COMPARED,
    *,
    plan: Plan | None = None,
    rounds: Rounds | None = None,
    settings: ProfileSettings | None = None,
    backend: Backend | None = None,
) -> list[MeasuredMethod]:
    """Profiles once, then plans and measures by each method; every rank calls it and gets the same.

    Args:
        make: Makes a new model with the same weights and a rank's batch; called several times.
        methods: Names from ``METHODS``.
        plan: A plan to measure instead of profiling and planning.
        rounds: The extent of the measurement.
        settings: Settings of rank 0's profiler.
        backend: The backend of this rank; by default its share of the host's cores.
    """
    backend, rounds = backend or HostBackend(cores=cores_of_rank()), rounds or Rounds()
    world = World.join(backend.torch_device)
    plans: dict[str, Plan | str]
    plans = {plan.search.method: plan} if plan is not None else _plans(world, make(), methods, backend, settings)
    baseline = _data_parallel(make())
    measured: dict[str, MeasuredMethod] = {}
    layouts: dict[Any, str] = {}
    for method, planned in plans.items():
        if isinstance(planned, str):
            measured[method] = MeasuredMethod(method=method, reason=planned)
            continue
        layout = tuple(replace(placed, forward_ms=0.0, backward_ms=0.0) for placed in planned.placements)
        first = layouts.setdefault(layout, method)
        if first == method:
            measured[method] = _measured(world, method, planned, make(), baseline, rounds, backend)
        else:
            measured[method] = replace(measured[first], method=method, plan=planned, same_as=first)
    return list(measured.values())


def compare_launched(
    make: Callable[[], Trained], methods: Sequence[str] = COMPARED, **options: Any
) -> tuple[list[MeasuredMethod], bool]:
    """Compares as ``compare_plans`` does, and leaves the process group if this made it.

    Returns:
        What was measured, and whether this is the first rank.
    """
    was_there = dist.is_initialized()
    try:
        measured = compare_plans(make, methods, **options)
        return measured, dist.get_rank() == 0
    finally:
        if not was_there and dist.is_initialized():
            dist.destroy_process_group()


def _plans(
    world: World, trained: Trained, methods: Sequence[str], backend: Backend, settings: ProfileSettings | None
) -> dict[str, Plan | str]:
    """Has rank 0 plan by each method; a plan, or why there is none."""
    device = backend.torch_device
    ring = measure_ring(device, group=world.everyone)
    route = measure_route(device, group=world.everyone) if device.type == "cpu" else None
    on = prepare(world, trained.model, trained.sample, backend)

    def planned() -> dict[str, Plan | str]:
        profile = profile_of_all(on, ring, settings)
        cost = cost_of_ranks(trained.model, on.finding, profile, ring, world.size, route=route)
        plans: dict[str, Plan | str] = {}
        for method in methods:
            try:
                plans[method] = plan_to_run(method, on.finding.graph, cost, backend.device, num_devices=world.size)
            except (InfeasibleError, UndecidedError, ValueError) as reason:  # the others may have one
                plans[method] = str(reason)
        return plans

    plans: dict[str, Plan | str] = world.broadcast(world.run_on_all(lambda: planned() if world.rank == 0 else {}))
    return plans


def _measured(
    world: World,
    method: str,
    plan: Plan,
    trained: Trained,
    baseline: Steps,
    rounds: Rounds,
    backend: Backend,
) -> MeasuredMethod:
    handle = colocate_ranks(trained.model, sample=trained.sample, plan=plan, backend=backend)
    try:
        ours = Steps(trained.model, trained)
        ours.take(rounds.warm_steps)
        baseline.take(rounds.warm_steps)
        handle.clear_timeline()
        load = ForeignLoad()
        runs = {
            "ddp": lambda: slowest(world, baseline.take(rounds.steps)),
            "ours": lambda: slowest(world, ours.take(rounds.steps)),
        }
        ddp_ms, step_ms = take_turns(runs, rounds.rounds).values()
        share = load.share
        metrics, steps = handle.metrics(), rounds.rounds * rounds.steps
        sent = {
            phase: sum(n for name, n in metrics.items() if name.startswith(f"sent_bytes/{phase}/")) / steps
            for phase in ("forward", "backward", "reduce")
        }
    finally:
        handle.remove()
    told = world.all_gather((sent, ours.held_bytes, baseline.held_bytes, share))
    return MeasuredMethod(
        method=method,
        plan=plan,
        step_ms=tuple(ms for one in step_ms for ms in one),
        ddp_ms=tuple(ms for one in ddp_ms for ms in one),
        ratios=tuple(
            statistics.median(ours) / statistics.median(theirs) for ours, theirs in zip(step_ms, ddp_ms, strict=True)
        ),
        sent_bytes={phase: sum(by_rank[phase] for by_rank, *_ in told) for phase in sent},
        held_bytes=tuple(held for _, held, *_ in told),
        ddp_held_bytes=tuple(held for _, _, held, _ in told),
        foreign_cpu_share=told[0][-1],
    )


def slowest(world: World, times_ms: list[float]) -> list[float]:
    """Returns for each step the time of the rank that took longest; every rank calls it."""
    slowest_ms = torch.tensor(times_ms, dtype=torch.float64)
    dist.all_reduce(slowest_ms, dist.ReduceOp.MAX, group=world.carrier_of(slowest_ms))
    times: list[float] = slowest_ms.tolist()
    return times


class Steps:
    """Training steps of one loop on this rank."""

    def __init__(self, model: nn.Module, trained: Trained) -> None:
        self._model = model
        self._trained = trained
        self._optimizer = torch.optim.AdamW([p for p in trained.model.parameters() if p.requires_grad], 1e-5)

    def take(self, count: int) -> list[float]:
        """Takes ``count`` steps, after all ranks have come; returns their wall times in milliseconds."""
        dist.barrier()
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._trained.loss(called(self._model, self._trained.sample)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters, their gradients and the optimizer's state on this rank."""
        parameters = [p for p in self._trained.model.parameters() if not p.is_meta]
        gradients = [p for p in parameters if p in self._optimizer.state]
        state = [value for of in self._optimizer.state.values() for value in of.values()]
        return _nbytes(parameters) + _nbytes(gradients) + _nbytes(state)


def _data_parallel(trained: Trained) -> Steps:
    """Returns the steps of the baseline: torch's DDP on the same ranks."""
    trained.loss(called(trained.model, trained.sample)).backward()
    unused = any(p.requires_grad and p.grad is None for p in trained.model.parameters())
    trained.model.zero_grad(set_to_none=True)
    return Steps(DistributedDataParallel(trained.model, find_unused_parameters=unused), trained)


def called(model: nn.Module, sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(sample) if isinstance(sample, torch.Tensor) else model(*sample)


def _nbytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor) and not tensor.is_meta)
