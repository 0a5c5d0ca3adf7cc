"""The plans for several ranks: what rank 0 solves for, from a profile of the whole batch, and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mosaic.artifact import load_as
from mosaic.cost import Cost, CostModel
from mosaic.cost.communication import RankedCost
from mosaic.cost.degrees import degrees_to_measure
from mosaic.device import Device
from mosaic.engine.session import load_of_others, warn_of_no_profile
from mosaic.errors import InfeasibleError, UndecidedError, UnstableMeasurementError
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph, Part
from mosaic.hardware import Link
from mosaic.plan import Grid, Placement, Plan, SearchRecord, TemporalStage
from mosaic.profile import Profile
from mosaic.profiler import measure_ring, measure_route, open_cache, profile_modules, repeat_batch, traffic_of
from mosaic.ranks.session import RankSession, is_data_parallel
from mosaic.solver.runnable import DATA_PARALLEL, plan_to_run
from mosaic.take_turns import TrialSettings


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
    ring = measure_ring(world.device, group=world.everyone)
    route = measure_route(world.device, group=world.everyone) if world.device.type == "cpu" else None
    candidates: Candidates = world.broadcast(
        world.run_on_all(lambda: _planned(session, ring, route, trial) if world.rank == 0 else Candidates(plans=()))
    )
    return candidates


def _planned(session: RankSession, ring: Link, route: Link | None, trial: TrialSettings | None) -> Candidates:
    """Profiles and solves; where there is no memory to profile, returns data-parallel training, and says why."""
    request, graph, size = session.request, session.finding.graph, session.world.size
    backend, options = request.backend, request.options
    plain = data_parallel_plan(graph, backend.device, size)
    if options.method == DATA_PARALLEL:
        return Candidates(plans=(plain,), sentences=("nothing is measured: each module runs on all ranks",))
    subjects = tuple(repeat_batch(subject, size) for subject in session.finding.subjects)
    profile = load_as(Profile, options.profile)
    is_measured = profile is None
    try:
        if profile is None:
            profile = profile_modules(
                session.model,
                subjects,
                graph,
                backend,
                degrees=degrees_to_measure(size),
                network=ring,
                cache=open_cache(options.cache),
                settings=options.profiling,
                progress=options.progress,
            )
    except UnstableMeasurementError as error:
        if not options.may_fall_back:
            raise
        what_runs = "each module runs on all ranks, as in data-parallel training,"
        note = warn_of_no_profile(f"{session.world.me} did not profile", what_runs, error)
        return Candidates(plans=(plain,), sentences=(note,))
    with preserved(session.model, alone=session.finding.subjects):
        traffic = {subject.name: traffic_of(subject) for subject in subjects}

    def included_ms(module: str, degree: int) -> float:
        """The sum of the gradients over the ring, which a profile that is measured here has in its backwards."""
        return ring.all_reduce_ms(traffic[module].parameter_gradients, degree) if is_measured else 0.0

    cost = RankedCost(
        CostModel.from_profile(profile),
        traffic,
        ring,
        size,
        included_ms=included_ms,
        with_reduction=is_measured,
        routes=route,
    )
    plan = plan_to_run(options.method, graph, cost, backend.device, num_devices=size)
    if trial is None:
        candidates = Candidates(plans=(plan,), sentences=("no plan is tried: the one that was planned runs",))
    else:
        candidates = rank_plans_to_try(plan, graph, trial, cost=cost)
    load = load_of_others(profile, options.profiling)
    return replace(candidates, sentences=(*candidates.sentences, load)) if load else candidates


def data_parallel_plan(graph: ModuleGraph, device: Device, num_devices: int, *, cost: Cost | None = None) -> Plan:
    """Returns the plan of every module on all slots of all devices, in turn.

    It predicts times where the cost model knows all modules at that degree.

    Raises:
        InfeasibleError: Devices do not hold it, as far as memory is known.
        UndecidedError: See ``plan_to_run``.
    """
    record = SearchRecord(method=DATA_PARALLEL)
    if cost is not None and all(num_devices in cost.degrees(name) for name in graph.names):
        plan = plan_to_run(DATA_PARALLEL, graph, cost, device, num_devices=num_devices)
        narrow = [placed.module for placed in plan.placements if placed.degree < num_devices]
        if narrow:
            reasons = [f"{name} does not fit on all of them" for name in narrow]
            raise InfeasibleError(f"{num_devices} devices do not hold all modules", reasons=reasons)
        return replace(plan, search=record)
    slots, grid = tuple(range(device.num_slots)), Grid(ranks=tuple(range(num_devices)))
    stages = tuple(
        TemporalStage(placements=(Placement(part=Part(module=name), slots=slots, grid=grid),))
        for name in graph.topological_order()
    )
    return Plan(device=device, num_devices=num_devices, stages=stages, graph=graph.fingerprint, search=record)


def rank_plans_to_try(
    best: Plan, graph: ModuleGraph, settings: TrialSettings, *, cost: Cost | None = None
) -> Candidates:
    """Returns the plans to try against data-parallel training."""
    if is_data_parallel(best):
        return Candidates(plans=(best,), sentences=(f"nothing is tried: the plan is {DATA_PARALLEL} training",))
    try:
        plain = data_parallel_plan(graph, best.device, best.num_devices, cost=cost)
    except (InfeasibleError, UndecidedError) as error:
        why = str(error).replace("\n  -", ":")
        return Candidates(plans=(best,), sentences=(f"nothing is tried: {DATA_PARALLEL} training cannot run: {why}",))
    if cost is None or not (best.predicted_ms > 0 and plain.predicted_ms > 0):
        return Candidates(plans=(plain, best))
    times = ", ".join(f"{plan.search.method} {plan.predicted_ms:.2f} ms" for plan in (plain, best))
    predicted = f"predicted for modules and what they send: {times}; what Python takes to hand calls over is not in it"
    if plain.predicted_ms / best.predicted_ms < settings.smallest_gain:
        why = f"nothing is tried: below {settings.smallest_gain:g} times as fast, {DATA_PARALLEL} training runs"
        return Candidates(plans=(plain,), sentences=(why, predicted))
    return Candidates(plans=(plain, best), sentences=(predicted,))
