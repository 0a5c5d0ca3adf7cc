"""The plans for several ranks: what rank 0 solves for, from a profile of the whole batch, and data parallelism."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from mosaic.cost import Cost, CostModel
from mosaic.cost.communication import RankedCost
from mosaic.cost.degrees import degrees_to_measure
from mosaic.device import Device
from mosaic.engine.finding.find import Finding
from mosaic.engine.session import load_of_others, warn_of_no_profile
from mosaic.errors import InfeasibleError, UndecidedError, UnstableMeasurementError
from mosaic.files import load_as
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph, Part
from mosaic.hardware import Link
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.profile import Profile
from mosaic.profiler import (
    measure_ring,
    measure_route,
    profile_modules,
    repeat_batch,
    traffic_of,
)
from mosaic.ranks.session import RankSession
from mosaic.ranks.world.world import World
from mosaic.solver.runnable import DATA_PARALLEL, plan_to_run, with_reserved, without_reserved
from mosaic.take_turns import TrialSettings

_LOG = logging.getLogger("mosaic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The plans to try."""

    plans: tuple[Plan, ...]
    """The one to beat first; a single one runs untried."""
    sentences: tuple[str, ...] = ()
    """Reasons for the choice: predicted times, or why there is nothing to try."""


def plans_of_first(session: RankSession, trial: TrialSettings | None) -> Candidates:
    """Has rank 0 profile and solve; returns on all ranks what it wants to be tried, or raises its error on all.

    The links are measured in any case, which takes a fraction of a second: a profile that is given has none.
    """
    world = session.world
    ring, route = measure_links(world)
    candidates: Candidates = world.broadcast(
        world.run_on_all(lambda: _planned(session, ring, route, trial) if world.rank == 0 else Candidates(plans=()))
    )
    return candidates


def measure_links(world: World) -> tuple[Link, Link | None]:
    """Returns the links of a ring of all ranks, and the way of rows that travel; None for that of the ring."""
    ring = measure_ring(world.device, group=world.everyone)
    return ring, measure_route(world.device, group=world.everyone) if world.device.type == "cpu" else None


def _planned(session: RankSession, ring: Link, route: Link | None, trial: TrialSettings | None) -> Candidates:
    """Profiles and solves; where there is no memory to profile, returns data-parallel training, and says why."""
    request, finding, world = session.request, session.finding, session.world
    backend, options, size = request.backend, request.options, world.size
    profile = load_as(Profile, options.profile)
    slots = options.ranks.communication_slots if options.ranks is not None else 0
    plain = partial(data_parallel_plan, finding.graph, backend.device, size, communication_slots=slots)
    if options.method == DATA_PARALLEL:
        return Candidates(plans=(plain(),), sentences=("nothing is measured: each module runs on all ranks",))
    try:
        if profile is None:
            profile = profile_of_all(session, ring)
    except UnstableMeasurementError as error:
        if not options.may_fall_back:
            raise
        what_runs = "each module runs on all ranks, as in data-parallel training,"
        note = warn_of_no_profile(f"{world.me} did not profile", what_runs, error)
        return Candidates(plans=(plain(),), sentences=(note,))
    cost = cost_of_ranks(
        session.model, finding, profile, ring, size, sums_over_ring=options.profile is None, route=route
    )
    plan = plan_to_run(options.method, finding.graph, cost, backend.device, num_devices=size, communication_slots=slots)
    if trial is None:
        candidates = Candidates(plans=(plan,), sentences=("no plan is tried: the one that was planned runs",))
    else:
        candidates = rank_plans_to_try(plan, finding.graph, trial, cost=cost, communication_slots=slots)
    load = load_of_others(profile, options.profiling)
    if load and options.profile is None and backend.device.kind == "host":
        _LOG.warning("once others are gone, handle.replan(reason=..., optimizer=optimizer) on every rank plans anew")
    return replace(candidates, sentences=(*candidates.sentences, load)) if load else candidates


def profile_of_all(session: RankSession, ring: Link) -> Profile:
    """Profiles the batch of all ranks on this one, at ``degrees_to_measure``."""
    size, finding, options = session.world.size, session.finding, session.request.options
    return profile_modules(
        session.model,
        tuple(repeat_batch(subject, size) for subject in finding.subjects),
        finding.graph,
        session.request.backend,
        degrees=degrees_to_measure(size),
        network=ring,
        cache=session.cache,
        settings=options.profiling,
        progress=options.progress,
    )


def cost_of_ranks(
    model: nn.Module,
    finding: Finding,
    profile: Profile,
    ring: Link,
    num_ranks: int,
    *,
    sums_over_ring: bool = True,
    route: Link | None = None,
) -> RankedCost:
    """Returns the cost model of a profile of all ranks' batch, with what ranks send each other.

    With ``sums_over_ring`` the profile's backwards have the sum of the gradients over ``ring``, and the part of it that
    a backward hides is taken out. Otherwise its links are unknown; its times stay as they are, and rows that travel
    are added. They travel over ``route``, or over ``ring`` without one.
    """
    with preserved(model, alone=finding.subjects):
        traffic = {s.name: traffic_of(repeat_batch(s, num_ranks)) for s in finding.subjects}

    def included_ms(module: str, degree: int) -> float:
        return ring.all_reduce_ms(traffic[module].parameter_gradients, degree) if sums_over_ring else 0.0

    return RankedCost(
        CostModel.from_profile(profile),
        traffic,
        ring,
        num_ranks,
        included_ms=included_ms,
        with_reduction=sums_over_ring,
        routes=route,
    )


def data_parallel_plan(
    graph: ModuleGraph,
    device: Device,
    num_devices: int,
    *,
    cost: Cost | None = None,
    communication_slots: int = 0,
) -> Plan:
    """Returns the plan of every module on all slots of all devices, in turn.

    It predicts times where the cost model knows all modules at that degree.

    Raises:
        InfeasibleError: Devices do not hold it, as far as memory is known.
        UndecidedError: See ``plan_to_run``.
    """
    record = SearchRecord(method=DATA_PARALLEL)
    if cost is not None and all(num_devices in cost.degrees(name) for name in graph.names):
        plan = plan_to_run(
            DATA_PARALLEL, graph, cost, device, num_devices=num_devices, communication_slots=communication_slots
        )
        narrow = [placed.module for placed in plan.placements if placed.degree < num_devices]
        if narrow:
            reasons = [f"{name} does not fit on all of them" for name in narrow]
            raise InfeasibleError(f"{num_devices} devices do not hold all modules", reasons=reasons)
        return replace(plan, search=record)
    slots = tuple(range(without_reserved(device, communication_slots).num_slots))
    stages = tuple(
        Stage(placements=(Placement(part=Part(module=name), slots=slots, grid=Grid(ranks=tuple(range(num_devices)))),))
        for name in graph.topological_order()
    )
    plan = Plan(device=device, num_devices=num_devices, stages=stages, graph=graph.fingerprint, search=record)
    return with_reserved(plan, device, communication_slots)


def rank_plans_to_try(
    best: Plan,
    graph: ModuleGraph,
    settings: TrialSettings,
    *,
    cost: Cost | None = None,
    communication_slots: int = 0,
) -> Candidates:
    """Returns the plans to try against data-parallel training."""
    try:
        plain = data_parallel_plan(
            graph, best.device, best.num_devices, cost=cost, communication_slots=communication_slots
        )
    except (InfeasibleError, UndecidedError) as error:
        why = str(error).replace("\n  -", ":")
        return Candidates(plans=(best,), sentences=(f"nothing is tried: {DATA_PARALLEL} training cannot run: {why}",))
    if _shape_of(plain) == _shape_of(best):
        return Candidates(plans=(best,), sentences=(f"nothing is tried: the plan is {DATA_PARALLEL} training",))
    if cost is None or not (best.predicted_ms > 0 and plain.predicted_ms > 0):
        return Candidates(plans=(plain, best), sentences=(_layout(best),))
    times = ", ".join(f"{plan.search.method} {plan.predicted_ms:.2f} ms" for plan in (plain, best))
    predicted = f"predicted for modules and what they send: {times}; what Python takes to hand calls over is not in it"
    if plain.predicted_ms / best.predicted_ms < settings.smallest_gain:
        why = f"nothing is tried: below {settings.smallest_gain:g} times as fast, {DATA_PARALLEL} training runs"
        return Candidates(plans=(plain,), sentences=(why, predicted))
    return Candidates(plans=(plain, best), sentences=(predicted, _layout(best)))


def _shape_of(plan: Plan) -> Hashable:
    """Returns what makes a difference: what runs beside what, on how many slots, and which devices modules share.

    Which device is which makes none, since ranks are alike; nor does the order of stages: the loop's own order counts.
    """
    numbers: dict[int, int] = {}
    for placed in sorted(plan.placements, key=lambda placement: placement.module):
        for device in sorted(placed.devices):
            numbers.setdefault(device, len(numbers))
    return frozenset(
        frozenset(
            (placed.module, placed.quota, frozenset(numbers[device] for device in placed.devices))
            for placed in stage.placements
        )
        for stage in plan.stages
    )


def _layout(plan: Plan) -> str:
    stages = (
        " + ".join(f"{each.module}:{each.quota} on {','.join(map(str, each.devices))}" for each in stage.placements)
        for stage in plan.stages
    )
    return f"the plan of {plan.search.method}: {' | '.join(stages)}"
