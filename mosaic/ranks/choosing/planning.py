"""One plan for all ranks: rank 0 profiles the batch of all of them, solves, and tells the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from mosaic.artifact import parse, to_json
from mosaic.backends.base import Backend
from mosaic.cost import Cost, CostModel
from mosaic.cost.communication.ranked import RankedCost
from mosaic.engine.finding.find import Finding
from mosaic.engine.profiled import warn_of_busy
from mosaic.engine.trial.settings import TrialSettings
from mosaic.errors import UnstableMeasurementError
from mosaic.hardware import Link
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.profiler import ProfileSettings, Ring, measure_ring, preserved, profile_modules, repeat_batch, traffic_of
from mosaic.ranks.choosing.candidates import Candidates, data_parallel_plan, plans_to_try
from mosaic.ranks.choosing.routed import Routes
from mosaic.ranks.meeting.world import World
from mosaic.ranks.running.activate import Examined
from mosaic.solver.reserve import CommunicationSlots
from mosaic.solver.runnable import plan_to_run


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """How to plan."""

    method: str = "auto"
    """Who plans; one of ``RUNNABLE``."""
    profile: Profile | None = None
    """What to plan from, measured of the batch of all ranks together; None to measure it."""
    settings: ProfileSettings | None = None
    """How carefully to measure."""
    communication_slots: CommunicationSlots = 0
    """Slots that no module gets, or ``remainder``."""
    trial: TrialSettings | None = None
    """How plans are to be tried; None: the one that is planned runs."""
    direct: bool = True
    """Whether results may go straight, which they do on the host so far."""
    may_fall_back: bool = False
    """Whether training is data-parallel where rank 0 is too busy to profile; otherwise that is an error."""


def plans_of_first(
    world: World, model: nn.Module, finding: Finding, examined: Examined, backend: Backend, request: PlanRequest
) -> Candidates:
    """Has rank 0 profile and solve; returns on all ranks what it wants to be tried, or raises its error on all.

    The links are measured in any case, which takes a fraction of a second: a profile that is given has none. Rank 0
    alone profiles, so where its machine is too busy all ranks hear the same of it.
    """
    found, error = Candidates(plans=()), None
    ring = measure_ring(backend.torch_device, group=world.everyone)
    routes = Routes.agreed(finding, examined, world, direct=request.direct and backend.device.kind == "host")
    if world.rank == 0:
        try:
            found = _planned_or_not(world, model, finding, routes, ring, backend, request)
        except Exception as failure:  # whatever it is, the other ranks wait for an answer
            error = failure
    world.all_or_none(error)
    texts, sentences = world.first_says(([to_json(plan) for plan in found.plans], found.sentences))
    plans = tuple(parse(Plan, text, source="rank 0") for text in texts)
    return Candidates(plans=plans, sentences=tuple(sentences))


def _planned_or_not(
    world: World,
    model: nn.Module,
    finding: Finding,
    routes: Routes,
    ring: Ring,
    backend: Backend,
    request: PlanRequest,
) -> Candidates:
    """Profiles and solves; where the machine is too busy, returns data-parallel training alone, and says why."""
    profile = request.profile
    try:
        if profile is None:
            profile = profile_of_all(model, finding, backend, world.size, ring, request.settings)
    except UnstableMeasurementError as error:
        if not request.may_fall_back:
            raise
        slots = request.communication_slots
        plan = data_parallel_plan(finding.graph, backend.device, world.size, communication_slots=slots)
        what_runs = "each module runs on all ranks, as in data-parallel training,"
        note = warn_of_busy(f"{world.me} did not profile", what_runs, error)
        return Candidates(plans=(plan,), sentences=(note,))
    has_sums = request.profile is None
    cost = cost_of_ranks(model, finding, profile, ring, world.size, sums_over_ring=has_sums)
    return _planned(finding, cost, partial(routes.told, link=link_of(ring)), backend, world.size, request)


def _planned(
    finding: Finding,
    cost: Cost,
    told: Callable[[Plan], Plan],
    backend: Backend,
    num_ranks: int,
    request: PlanRequest,
) -> Candidates:
    slots = request.communication_slots
    plan = told(
        plan_to_run(
            request.method, finding.graph, cost, backend.device, num_devices=num_ranks, communication_slots=slots
        )
    )
    if request.trial is None:
        return Candidates(plans=(plan,), sentences=("no plan is tried: the one that was planned runs",))
    return plans_to_try(plan, finding.graph, request.trial, cost=cost, communication_slots=slots, told=told)


def cost_of_ranks(
    model: nn.Module, finding: Finding, profile: Profile, ring: Ring, num_ranks: int, *, sums_over_ring: bool = True
) -> RankedCost:
    """Returns the cost model of a profile with what ranks tell each other.

    Every result is taken to go home, which is an upper bound; ``Routes.told`` corrects a plan once it is there.

    Args:
        model: The model.
        finding: Its modules with the inputs of one rank's batch.
        profile: Of the batch of all ranks.
        ring: The links between ranks.
        num_ranks: Ranks.
        sums_over_ring: Whether the profile's backwards have the sum of the gradients over ``ring``, so that the part
            of it that a backward hides can be taken out. A profile that is given has it over links of which nobody
            knows; its times stay as they are, and rows that travel are added.
    """
    with preserved(model):
        traffic = {s.name: traffic_of(repeat_batch(s, num_ranks)) for s in finding.subjects}
    link = link_of(ring)

    def included_ms(module: str, degree: int) -> float:
        return ring.all_reduce_ms(traffic[module].parameter_gradients, degree) if sums_over_ring else 0.0

    return RankedCost(
        CostModel.from_profile(profile),
        traffic,
        lambda degree: link,
        num_ranks,
        included_ms=included_ms,
        with_reduction=sums_over_ring,
    )


def link_of(ring: Ring) -> Link:
    """Returns one of a ring's links."""
    return Link(gb_per_s=ring.gb_per_s, latency_us=ring.latency_us)


def profile_of_all(
    model: nn.Module,
    finding: Finding,
    backend: Backend,
    num_ranks: int,
    ring: Ring,
    settings: ProfileSettings | None = None,
) -> Profile:
    """Profiles the batch of all ranks on this one, at every degree that is a power of two.

    Args:
        model: The model.
        finding: Its modules with the inputs of one rank's batch, of which every rank has as many rows.
        backend: Where to measure.
        num_ranks: Ranks.
        ring: Adds to backwards what summing gradients takes.
        settings: How carefully.
    """
    degrees = [1 << power for power in range(num_ranks.bit_length()) if 1 << power <= num_ranks]
    subjects = tuple(repeat_batch(subject, num_ranks) for subject in finding.subjects)
    return profile_modules(model, subjects, finding.graph, backend, degrees=degrees, network=ring, settings=settings)
