"""Plans of several planners measured on these ranks, each in turn with data-parallel training on the same ranks.

Every rank calls this with a function that makes the same model. The baseline is torch's own DDP in the same processes,
with the same threads, on the same slices of the batch: rounds of its steps and of the colocated loop's take turns, so
that a drift of the machine hits both. A step ends with its slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mosaic.backends.base import Backend
from mosaic.engine.finding.find import runner_of
from mosaic.engine.options import Options
from mosaic.engine.session import Request
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.plan import Plan
from mosaic.profiler import ForeignLoad, ProfileSettings
from mosaic.ranks.choosing.plans import cost_of_ranks, measure_links, profile_of_all
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.session import RankSession
from mosaic.ranks.world.groups import backend_of
from mosaic.ranks.world.rendezvous import CPU
from mosaic.ranks.world.world import World
from mosaic.solver.methods import compared_methods
from mosaic.solver.runnable import plan_to_run
from mosaic.take_turns import take_turns

COMPARED = compared_methods()
"""Methods that are compared unless others are named."""
_WARM_STEPS = 2
"""Steps of each loop before anything counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMethod:
    """The measurements of one method's plan."""

    method: str
    plan: Plan | None = None
    """The plan that ran; None where the method made none."""
    same_as: str = ""
    """An earlier method with the same plan, whose measurements these are; empty for none."""
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
    make: Callable[[], Any],
    methods: Sequence[str] = COMPARED,
    *,
    plan: Plan | None = None,
    rounds: int = 4,
    steps: int = 5,
    settings: ProfileSettings | None = None,
    backend: Backend | None = None,
) -> list[MeasuredMethod]:
    """Profiles once, then plans and measures by each method; every rank calls it and gets the same.

    Args:
        make: Makes a new object with the same ``model``, a rank's batch ``sample`` and ``loss``, from the model's
            output to a scalar; called several times.
        methods: Names from ``METHODS``.
        plan: A plan to measure instead of profiling and planning.
        rounds: Rounds in which both loops take turns; 1 or more.
        steps: Steps of each in a round.
        settings: Settings of rank 0's profiler.
        backend: The backend of this rank; by default its share of the host's cores.
    """
    backend = backend or backend_of(CPU)
    world = World.join(backend.torch_device)
    plans: Mapping[str, Plan | str] = (
        {plan.search.method: plan} if plan is not None else _plans(world, make(), methods, backend, settings)
    )
    workload = make()
    workload.loss(runner_of(workload.model, workload.sample)()).backward()
    unused = any(p.requires_grad and p.grad is None for p in workload.model.parameters())
    workload.model.zero_grad(set_to_none=True)
    baseline = Steps(DistributedDataParallel(workload.model, find_unused_parameters=unused), workload)
    measured: dict[str, MeasuredMethod] = {}
    layouts: dict[Any, str] = {}
    for method, planned in plans.items():
        if isinstance(planned, str):
            measured[method] = MeasuredMethod(method=method, reason=planned)
            continue
        layout = tuple(replace(placed, forward_ms=0.0, backward_ms=0.0) for placed in planned.placements)
        first = layouts.setdefault(layout, method)
        if first == method:
            measured[method] = _measured(world, planned, make(), baseline, rounds, steps, backend)
        else:
            measured[method] = replace(measured[first], method=method, plan=planned, same_as=first)
    return list(measured.values())


def leave() -> bool:
    """Destroys the process group; returns whether this process was the first rank."""
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return is_first


def _plans(
    world: World, workload: Any, methods: Sequence[str], backend: Backend, settings: ProfileSettings | None
) -> Mapping[str, Plan | str]:
    """Has rank 0 plan by each method; returns plans, or why there is none."""
    ring, route = measure_links(world)
    request = Request(sample=workload.sample, backend=backend, options=Options(profiling=settings))
    session = RankSession(model=workload.model, request=request, world=world)
    session.find()
    graph = session.finding.graph

    def planned() -> dict[str, Plan | str]:
        cost = cost_of_ranks(
            workload.model, session.finding, profile_of_all(session, ring), ring, world.size, route=route
        )
        plans: dict[str, Plan | str] = {}
        for method in methods:
            try:
                plans[method] = plan_to_run(method, graph, cost, backend.device, num_devices=world.size)
            except (InfeasibleError, UndecidedError, ValueError) as reason:  # the others may have one
                plans[method] = str(reason)
        return plans

    plans: dict[str, Plan | str] = world.broadcast(world.run_on_all(lambda: planned() if world.rank == 0 else {}))
    return plans


def _measured(
    world: World, plan: Plan, workload: Any, baseline: Steps, rounds: int, steps: int, backend: Backend
) -> MeasuredMethod:
    handle = colocate_ranks(workload.model, sample=workload.sample, plan=plan, backend=backend)
    try:
        loops = {"ddp": baseline, "ours": Steps(workload.model, workload)}
        for loop in loops.values():
            loop.take(_WARM_STEPS)
        handle.clear_timeline()
        load = ForeignLoad()
        runs = {name: lambda loop=loop: slowest(world, loop.take(steps)) for name, loop in loops.items()}
        ddp_ms, step_ms = take_turns(runs, rounds).values()
        share, metrics = load.share, handle.metrics()
    finally:
        handle.remove()
    own = {
        phase: sum(value for name, value in metrics.items() if name.startswith(f"sent_bytes/{phase}/"))
        for phase in ("forward", "backward", "reduce")
    }
    held = [loop.held_bytes for loop in loops.values()]
    sent, ddp_held, held_here, shares = zip(*world.all_gather((own, *held, share)), strict=True)
    return MeasuredMethod(
        method=plan.search.method,
        plan=plan,
        step_ms=tuple(ms for times in step_ms for ms in times),
        ddp_ms=tuple(ms for times in ddp_ms for ms in times),
        ratios=tuple(
            statistics.median(ours) / statistics.median(theirs) for ours, theirs in zip(step_ms, ddp_ms, strict=True)
        ),
        sent_bytes={phase: sum(each[phase] for each in sent) / (rounds * steps) for phase in own},
        held_bytes=held_here,
        ddp_held_bytes=ddp_held,
        foreign_cpu_share=shares[0],
    )


def slowest(world: World, times_ms: list[float]) -> list[float]:
    """Returns for each step the time of the rank that took longest; every rank calls it."""
    return [max(step) for step in zip(*world.all_gather(times_ms), strict=True)]


class Steps:
    """Training steps of one loop on this rank."""

    def __init__(self, model: nn.Module, workload: Any) -> None:
        self._model = model
        self._workload = workload
        self._optimizer = torch.optim.AdamW([p for p in workload.model.parameters() if p.requires_grad], 1e-5)

    def take(self, count: int) -> list[float]:
        """Takes ``count`` steps, after all ranks have come; returns their wall times in milliseconds."""
        dist.barrier()
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._workload.loss(runner_of(self._model, self._workload.sample)()).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters, their gradients and the optimizer's state on this rank."""
        parameters = [p for p in self._workload.model.parameters() if not p.is_meta]
        gradients = [p for p in parameters if p in self._optimizer.state]
        state = [value for of in self._optimizer.state.values() for value in of.values()]
        tensors = [t for t in (*parameters, *gradients, *state) if isinstance(t, torch.Tensor) and not t.is_meta]
        return sum(tensor.nbytes for tensor in tensors)
