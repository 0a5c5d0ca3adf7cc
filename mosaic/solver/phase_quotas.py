"""What a quota for each phase would be worth: forward and backward each on quotas of their own, in a plan's stages.

A plan gives a module one quota, and no engine here runs another: on CUDA a backward runs on the stream of its forward.
So the result is a study and no plan: it cannot be run by mistake, and a plan file with a second quota is refused as one
with an unknown field. Stages, devices and degrees stay as they are: parameters and activations are on those devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.cost import Cost
from mosaic.plan import Placement, Plan, Stage
from mosaic.profile import Phase

Quotas = Mapping[str, int]
"""Slots of each module of a stage, on each of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStage:
    """One stage with quotas for each phase; predicted."""

    forward: Quotas
    """In forward."""
    backward: Quotas
    """In backward."""
    forward_ms: float
    """Its slowest forward, in milliseconds."""
    backward_ms: float
    """Its slowest backward, in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseQuotas:
    """A plan's stages with quotas for each phase."""

    stages: tuple[PhaseStage, ...]
    """In the plan's order."""

    @property
    def predicted_ms(self) -> float:
        """Predicted time of a step, in milliseconds; never above the plan's."""
        return sum(stage.forward_ms + stage.backward_ms for stage in self.stages)


def split_by_phase(plan: Plan, cost: Cost) -> PhaseQuotas:
    """Chooses quotas for each phase of a plan's stages.

    The best for modules that do not disturb each other. Where they do, those quotas or the plan's, whichever take less
    beside the neighbours that they then have.
    """
    stages = []
    for stage in plan.stages:
        chosen = {phase: _best(stage, phase, plan, cost) for phase in Phase}
        stages.append(
            PhaseStage(
                forward=chosen[Phase.FORWARD][1],
                backward=chosen[Phase.BACKWARD][1],
                forward_ms=chosen[Phase.FORWARD][0],
                backward_ms=chosen[Phase.BACKWARD][0],
            )
        )
    return PhaseQuotas(stages=tuple(stages))


def _best(stage: Stage, phase: Phase, plan: Plan, cost: Cost) -> tuple[float, Quotas]:
    own = {p.module: p.quota for p in stage.placements}
    found = _quickest(stage, phase, plan, cost)
    return min(((_slowest_ms(stage, phase, quotas, cost), quotas) for quotas in (own, found)), key=lambda one: one[0])


def _quickest(stage: Stage, phase: Phase, plan: Plan, cost: Cost) -> Quotas:
    """The quotas with which the slowest phase alone takes least; by bisection over the times that there are."""
    tables = {p.module: _times(p, phase, plan.device.num_slots, cost) for p in stage.placements}
    targets = sorted({time_ms for table in tables.values() for _, time_ms in table})
    low, high = 0, len(targets) - 1  # at the last target every module has its least quota
    while low < high:
        middle = (low + high) // 2
        if _meeting(stage.placements, tables, targets[middle], plan.device.num_slots) is None:
            low = middle + 1
        else:
            high = middle
    found = _meeting(stage.placements, tables, targets[low], plan.device.num_slots)
    assert found is not None  # the plan's own quotas meet the last target
    return found


def _times(placement: Placement, phase: Phase, num_slots: int, cost: Cost) -> Sequence[tuple[int, float]]:
    module, degree = placement.module, placement.degree
    quotas = [quota for quota in cost.quotas(module, degree) if quota <= num_slots]
    return [(quota, cost.time_ms(module, phase, degree, quota)) for quota in quotas]


def _meeting(
    placements: Sequence[Placement],
    tables: Mapping[str, Sequence[tuple[int, float]]],
    target_ms: float,
    num_slots: int,
) -> Quotas | None:
    """The least quotas that meet a target, where there is room for them."""
    used: dict[int, int] = {}
    chosen = {}
    for placement in placements:
        least = min((q for q, time_ms in tables[placement.module] if time_ms <= target_ms), default=None)
        if least is None:
            return None
        chosen[placement.module] = least
        for device in placement.devices:
            used[device] = used.get(device, 0) + least
            if used[device] > num_slots:
                return None
    return chosen


def _slowest_ms(stage: Stage, phase: Phase, quotas: Quotas, cost: Cost) -> float:
    return max(
        cost.placed_ms(
            p.module,
            phase,
            p.degree,
            quotas[p.module],
            beside=[(n.module, quotas[n.module]) for n in stage.placements if n is not p and device in n.devices],
        )
        for p in stage.placements
        for device in p.devices
    )
