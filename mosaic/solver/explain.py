"""Why a plan is as it is: what holds each module at its quota, what more hardware would bring, what comes second."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from mosaic.cost import Cost
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import Placement, Plan, Stage
from mosaic.profile import Phase
from mosaic.solver.exact.search import ExactResult, SearchHint, search_exactly, why_not_exact
from mosaic.solver.memory.holding import keeps_anything
from mosaic.solver.memory.search import search_within_memory
from mosaic.solver.options import all_options
from mosaic.solver.replan.replanner import start_from
from mosaic.solver.solve import find_solution
from mosaic.solver.stage import Machine
from mosaic.solver.task import SearchOptions

Limit = Literal["all slots", "no gain", "slots", "memory", "neighbours"]

_CLOSE = 1e-9


@runtime_checkable
class KnowsSlots(Protocol):
    """A cost model in which what neighbours cost depends on the slots that a device has."""

    def with_slots(self, num_slots: int) -> Cost:
        """Returns the same modules on devices of so many slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReason:
    """What binds one module of a plan."""

    module: str
    """Name in the graph."""
    stage: int
    """Index of its stage."""
    quota: int
    """Slots on each of its devices."""
    decides: tuple[Phase, ...]
    """Phases in which it is the slowest of its stage."""
    slack_ms: float
    """How much longer its forward and backward could take, each alone, before the stage does; the smaller of both."""
    next_quota: int | None
    """Next larger quota of its degree; None if there is none."""
    limit: Limit
    """Why it has no more: there is none (``all slots``); it takes no less time at any (``no gain``); the stage's
    other modules hold the slots (``slots``); or, with room, neighbours would lose more than it gains (``neighbours``).
    ``memory``: another degree would be faster, has the slots, and its memory does not fit beside the others."""
    waits_for: tuple[str, ...]
    """Modules that it depends on in the stage before: why it is not in an earlier one; empty if nothing holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What the plan would take if something were different."""

    what: str
    """What is different."""
    predicted_ms: float | None
    """Predicted step then, in milliseconds; None where it cannot be said, and ``note`` has the reason."""
    saves_ms: float = 0.0
    """How much less that is than the plan; negative: it costs more."""
    note: str = ""
    """What to know about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan with its reasons. Everything is predicted; nothing here is measured."""

    plan: Plan
    """What is explained."""
    modules: tuple[ModuleReason, ...]
    """One for each module, in the plan's order."""
    changes: tuple[Change, ...]
    """One more slot, one more device, twice the memory."""
    next_best: Change
    """The best plan that divides the modules into other stages."""


def explain(plan: Plan, graph: ModuleGraph, cost: Cost, *, search: SearchOptions | None = None) -> Explanation:
    """Explains a plan.

    Every "what if" is a search of its own, within the limits of ``search``; where it ends early, the
    figure is that of the best plan found, and its note says so.

    Raises:
        InvalidPlanError: The plan does not cover the graph.
    """
    plan.check_covers(graph)
    search = search or SearchOptions()
    reasons = [
        _reason(placement, index, plan, graph, cost)
        for index, stage in enumerate(plan.stages)
        for placement in stage.placements
    ]
    unable = why_not_exact(graph, cost)
    ask = _Asker(plan, graph, cost, search)
    if unable is not None:
        unknown = Change(what="another partition", predicted_ms=None, note=unable)
        return Explanation(plan=plan, modules=tuple(reasons), changes=(), next_best=unknown)
    return Explanation(plan=plan, modules=tuple(reasons), changes=ask.more(), next_best=ask.next_best())


@dataclass(frozen=True, slots=True)
class _Asker:
    plan: Plan
    graph: ModuleGraph
    cost: Cost
    search: SearchOptions

    def more(self) -> tuple[Change, ...]:
        """Solves again with a little more of everything."""
        device, count = self.plan.device, self.plan.num_devices
        wider = replace(device, num_slots=device.num_slots + 1)
        cost = self.cost.with_slots(wider.num_slots) if isinstance(self.cost, KnowsSlots) else self.cost
        of_wider = replace(self, cost=cost)
        changes = [of_wider._solved("one more slot on each device", replace(self.plan, device=wider))]
        changes.append(self._solved("one more device", replace(self.plan, num_devices=count + 1)))
        if device.memory_bytes:
            larger = replace(device, memory_bytes=2 * device.memory_bytes)
            changes.append(self._solved("twice the memory", replace(self.plan, device=larger)))
        return tuple(changes)

    def next_best(self) -> Change:
        """Any other partition lacks one of this plan's stages: the best of as many searches, each without one."""
        what = "the best plan with other stages"
        device, count = self.plan.device, self.plan.num_devices
        options = all_options(self.graph, cost=self.cost, device=device, num_devices=count, grid=self.search.grid)
        machine = Machine(num_devices=count, num_slots=device.num_slots, memory_bytes=device.memory_bytes)
        is_held = self.search.hold_memory and keeps_anything(options, machine)
        ask = search_within_memory if is_held else search_exactly
        found: list[ExactResult] = []
        for stage in self.plan.stages:
            hint = SearchHint(forbidden=[stage.names], known=found[-1].known if found else None)
            with suppress(InfeasibleError, UndecidedError):  # there is no plan without this stage
                found.append(
                    ask(self.graph, options, cost=self.cost, machine=machine, limits=self.search.limits, hint=hint)
                )
        if not found:
            return Change(what=what, predicted_ms=None, note="no other partition fits")
        best = min(found, key=lambda one: one.cost_ms)
        num_open = sum(one.record.status != "optimal" for one in found)
        note = " | ".join(", ".join(stage.choices) for stage in best.stages)
        note += f"; {num_open} searches ended before a proof" if num_open else ""
        return Change(what=what, predicted_ms=best.cost_ms, saves_ms=self.plan.predicted_ms - best.cost_ms, note=note)

    def _solved(self, what: str, given: Plan) -> Change:
        found = find_solution(
            self.graph,
            self.cost,
            given.device,
            num_devices=given.num_devices,
            search=self.search,
            hint=SearchHint(start=start_from(self.plan, self.graph)),
        ).plan
        note = "" if found.search.status == "optimal" else "best found; not proven"
        saves = self.plan.predicted_ms - found.predicted_ms
        return Change(what=what, predicted_ms=found.predicted_ms, saves_ms=saves, note=note)


def _reason(placement: Placement, index: int, plan: Plan, graph: ModuleGraph, cost: Cost) -> ModuleReason:
    stage = plan.stages[index]
    slack = {
        Phase.FORWARD: stage.forward_ms - placement.forward_ms,
        Phase.BACKWARD: stage.backward_ms - placement.backward_ms,
    }
    step = _CLOSE * max(1.0, stage.forward_ms + stage.backward_ms)
    quotas = cost.quotas(placement.module, placement.degree)
    larger = [quota for quota in quotas if placement.quota < quota <= plan.device.num_slots]
    before = plan.stages[index - 1].names if index else ()
    return ModuleReason(
        module=placement.module,
        stage=index,
        quota=placement.quota,
        decides=tuple(phase for phase, left in slack.items() if left <= step),
        slack_ms=max(0.0, min(slack.values())),
        next_quota=min(larger) if larger else None,
        limit=_limit(placement, stage, larger, plan, cost),
        waits_for=tuple(name for name in graph.predecessors(placement.module) if name in before),
    )


def _limit(placement: Placement, stage: Stage, larger: Sequence[int], plan: Plan, cost: Cost) -> Limit:
    if _lacks_memory(placement, stage, plan, cost):
        return "memory"
    if not larger:
        return "all slots"
    own_ms = _alone_ms(cost, placement, placement.degree, placement.quota)
    # Work comes in waves: the next quota may be no faster, and one beyond it is.
    faster = [quota for quota in larger if _alone_ms(cost, placement, placement.degree, quota) < own_ms]
    if not faster:
        return "no gain"
    held = {d: sum(p.quota for p in stage.placements if d in p.devices) for d in placement.devices}
    room = min(plan.device.num_slots - taken for taken in held.values())
    return "slots" if min(faster) - placement.quota > room else "neighbours"


def _lacks_memory(placement: Placement, stage: Stage, plan: Plan, cost: Cost) -> bool:
    """Whether a degree at which the module is faster fails for memory alone beside its stage's others."""
    limit = plan.device.memory_bytes
    if not limit:
        return False
    others = [
        [p for p in stage.placements if device in p.devices and p.module != placement.module]
        for device in range(plan.num_devices)
    ]
    used = [  # where there are slots for it
        sum(cost.memory_bytes(p.module, p.degree) for p in beside)
        for beside in others
        if sum(p.quota for p in beside) + placement.quota <= plan.device.num_slots
    ]
    own_ms = _alone_ms(cost, placement, placement.degree, placement.quota)
    for degree in cost.degrees(placement.module):
        if degree > len(used) or placement.quota not in cost.quotas(placement.module, degree):
            continue
        fits = sum(taken + cost.memory_bytes(placement.module, degree) <= limit for taken in used) >= degree
        if not fits and _alone_ms(cost, placement, degree, placement.quota) < own_ms:
            return True
    return False


def _alone_ms(cost: Cost, placement: Placement, degree: int, quota: int) -> float:
    return sum(cost.time_ms(placement.module, phase, degree, quota) for phase in Phase)
