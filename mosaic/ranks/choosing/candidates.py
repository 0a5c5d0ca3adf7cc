"""The plans for several ranks that are tried: the solver's and data-parallel training."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph, Part
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.solver.runnable import DATA_PARALLEL, plan_to_run, with_reserved, without_reserved
from mosaic.take_turns import TrialSettings

RANK_TRIAL = TrialSettings(
    max_steps=60, max_lost_steps=30, steps_per_visit=2, warm_steps=1, rounds_to_win=5, max_plans=2
)
"""The default trial: short turns, and so many that one slow moment of the machine decides nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The plans to try."""

    plans: tuple[Plan, ...]
    """The one to beat first; a single one runs untried."""
    sentences: tuple[str, ...] = ()
    """Reasons for the choice: predicted times, or why there is nothing to try."""
    is_rough: bool = False
    """True if other processes used the CPU while rank 0 profiled."""


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
    is_known = cost is not None and best.predicted_ms > 0 and plain.predicted_ms > 0
    predicted = _predicted(plain, best)
    gain = plain.predicted_ms / best.predicted_ms if is_known else None
    if gain is not None and gain < settings.smallest_gain:
        why = f"nothing is tried: below {settings.smallest_gain:g} times as fast, {DATA_PARALLEL} training runs"
        return Candidates(plans=(plain,), sentences=(why, predicted))
    if cost is None or gain is None:
        return Candidates(plans=(plain, best), sentences=(_layout(best),))
    return Candidates(plans=(plain, best), sentences=(predicted, _layout(best)))


def _shape_of(plan: Plan) -> Hashable:
    """Returns what makes a difference: what runs beside what, on how many slots, and which devices modules share.

    Which device is which makes none, since ranks are alike; nor does the order of stages: the loop's own order counts.
    """
    numbers: dict[int, int] = {}
    for placed in sorted(plan.placements, key=lambda one: one.module):
        for device in sorted(placed.devices):
            numbers.setdefault(device, len(numbers))
    return frozenset(
        frozenset(
            (one.module, one.quota, frozenset(numbers[device] for device in one.devices)) for one in stage.placements
        )
        for stage in plan.stages
    )


def _predicted(*plans: Plan) -> str:
    times = ", ".join(f"{plan.search.method} {plan.predicted_ms:.2f} ms" for plan in plans)
    return f"predicted for modules and what they send: {times}; what Python takes to hand calls over is not in it"


def _layout(plan: Plan) -> str:
    stages = (
        " + ".join(f"{one.module}:{one.quota} on {','.join(map(str, one.devices))}" for one in stage.placements)
        for stage in plan.stages
    )
    return f"the plan of {plan.search.method}: {' | '.join(stages)}"
