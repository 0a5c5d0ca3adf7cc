"""One plan for all ranks: rank 0 profiles the batch of all of them, solves, and tells the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mosaic.artifact import parse, to_json
from mosaic.backends.base import Backend
from mosaic.cost import CostModel
from mosaic.cost.communication import RankedCost
from mosaic.engine.find import Finding
from mosaic.hardware import Link
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.profiler import ProfileSettings, Ring, measure_ring, preserved, profile_modules, repeat_batch, traffic_of
from mosaic.ranks.world import World
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


def plan_of_first(world: World, model: nn.Module, finding: Finding, backend: Backend, request: PlanRequest) -> Plan:
    """Has rank 0 profile and solve; returns its plan on all ranks, or raises its error on all."""
    text, error = "", None
    is_measured = world.first_says(request.profile is None)
    ring = measure_ring(backend.torch_device, group=world.everyone) if is_measured else None
    if world.rank == 0:
        try:
            profile = request.profile
            if ring is not None:
                profile = profile_of_all(model, finding, backend, world.size, ring, request.settings)
            assert profile is not None
            cost = cost_of_ranks(model, finding, profile, ring, world.size)
            plan = plan_to_run(
                request.method,
                finding.graph,
                cost,
                backend.device,
                num_devices=world.size,
                communication_slots=request.communication_slots,
            )
            text = to_json(plan)
        except Exception as failure:  # whatever it is, the other ranks wait for an answer
            error = failure
    world.all_or_none(error)
    return parse(Plan, world.first_says(text), source="rank 0")


def cost_of_ranks(
    model: nn.Module, finding: Finding, profile: Profile, ring: Ring | None, num_ranks: int
) -> CostModel | RankedCost:
    """Returns the cost model of a profile with what ranks tell each other; without it where no link was measured.

    Args:
        model: The model.
        finding: Its modules with the inputs of one rank's batch.
        profile: Of the batch of all ranks; its backwards have the sum of the gradients over ``ring``.
        ring: The links between ranks; None where the profile was given, and with it whatever its times have.
        num_ranks: Ranks.
    """
    cost = CostModel.from_profile(profile)
    if ring is None:
        return cost
    with preserved(model):
        traffic = {s.name: traffic_of(repeat_batch(s, num_ranks)) for s in finding.subjects}
    link = Link(gb_per_s=ring.gb_per_s, latency_us=ring.latency_us)
    return RankedCost(
        cost,
        traffic,
        lambda degree: link,
        num_ranks,
        included_ms=lambda module, degree: ring.all_reduce_ms(traffic[module].parameter_gradients, degree),
    )


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
