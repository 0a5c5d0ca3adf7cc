"""One plan for all ranks: rank 0 profiles the batch of all of them, solves, and tells the others."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mosaic.artifact import parse, to_json
from mosaic.cost import CostModel
from mosaic.cost.communication import RankedCost
from mosaic.cost.degrees import degrees_to_measure
from mosaic.engine.finding.find import Finding
from mosaic.engine.options import Options
from mosaic.engine.session import load_of_others, warn_of_no_profile
from mosaic.errors import UnstableMeasurementError
from mosaic.files import load_as
from mosaic.find.restore import preserved
from mosaic.hardware import Link
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.profiler import (
    ProfileCache,
    ProfileSettings,
    ProgressCallback,
    measure_ring,
    measure_route,
    profile_modules,
    repeat_batch,
    traffic_of,
)
from mosaic.ranks.choosing.candidates import Candidates, data_parallel_plan, rank_plans_to_try
from mosaic.ranks.running.prepare import Prepared
from mosaic.solver.runnable import DATA_PARALLEL, plan_to_run
from mosaic.take_turns import TrialSettings


def plans_of_first(
    on: Prepared, options: Options, trial: TrialSettings | None, kept: ProfileCache | None = None
) -> Candidates:
    """Has rank 0 profile and solve; returns on all ranks what it wants to be tried, or raises its error on all.

    The links are measured in any case, which takes a fraction of a second: a profile that is given has none.
    """
    world = on.world
    device = on.backend.torch_device
    ring = measure_ring(device, group=world.everyone)
    route = measure_route(device, group=world.everyone) if device.type == "cpu" else None
    candidates = world.run_on_all(
        lambda: _planned(on, ring, route, options, trial, kept) if world.rank == 0 else Candidates(plans=())
    )
    texts, sentences = world.broadcast(([to_json(plan) for plan in candidates.plans], candidates.sentences))
    plans = tuple(parse(Plan, text, source="rank 0") for text in texts)
    return replace(candidates, plans=plans, sentences=tuple(sentences))


def _planned(
    on: Prepared,
    ring: Link,
    route: Link | None,
    options: Options,
    trial: TrialSettings | None,
    kept: ProfileCache | None,
) -> Candidates:
    """Profiles and solves; where there is no memory to profile, returns data-parallel training, and says why."""
    model, finding, backend = on.model, on.finding, on.backend
    profile, size = load_as(Profile, options.profile), on.world.size
    slots = options.ranks.communication_slots if options.ranks is not None else 0
    if options.method == DATA_PARALLEL:
        plan = data_parallel_plan(finding.graph, backend.device, size, communication_slots=slots)
        return Candidates(plans=(plan,), sentences=("nothing is measured: each module runs on all ranks",))
    try:
        if profile is None:
            profile = profile_of_all(on, ring, options.profiling, options.progress, kept)
    except UnstableMeasurementError as error:
        if not options.may_fall_back:
            raise
        plan = data_parallel_plan(finding.graph, backend.device, size, communication_slots=slots)
        what_runs = "each module runs on all ranks, as in data-parallel training,"
        note = warn_of_no_profile(f"{on.world.me} did not profile", what_runs, error)
        return Candidates(plans=(plan,), sentences=(note,))
    cost = cost_of_ranks(model, finding, profile, ring, size, sums_over_ring=options.profile is None, route=route)
    plan = plan_to_run(options.method, finding.graph, cost, backend.device, num_devices=size, communication_slots=slots)
    if trial is None:
        candidates = Candidates(plans=(plan,), sentences=("no plan is tried: the one that was planned runs",))
    else:
        candidates = rank_plans_to_try(plan, finding.graph, trial, cost=cost, communication_slots=slots)
    load = load_of_others(profile, options.profiling)
    is_rough = bool(load) and options.profile is None and backend.device.kind == "host"
    return replace(candidates, sentences=(*candidates.sentences, load), is_rough=is_rough) if load else candidates


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
    """Returns the cost model of a profile with what ranks tell each other.

    Args:
        model: The model.
        finding: Its modules with the inputs of one rank's batch.
        profile: Of the batch of all ranks.
        ring: The links between ranks.
        num_ranks: Ranks.
        sums_over_ring: Whether the profile's backwards have the sum of the gradients over ``ring``, so that the part
            of it that a backward hides can be taken out. A profile that is given has it over links of which nobody
            knows; its times stay as they are, and rows that travel are added.
        route: The way of rows that travel; None: that of ``ring``.
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


def profile_of_all(
    on: Prepared,
    ring: Link,
    settings: ProfileSettings | None = None,
    progress: ProgressCallback | None = None,
    kept: ProfileCache | None = None,
) -> Profile:
    """Profiles the batch of all ranks on this one, at ``degrees_to_measure``."""
    size, finding = on.world.size, on.finding
    return profile_modules(
        on.model,
        tuple(repeat_batch(subject, size) for subject in finding.subjects),
        finding.graph,
        on.backend,
        degrees=degrees_to_measure(size),
        network=ring,
        cache=kept,
        settings=settings,
        progress=progress,
    )
