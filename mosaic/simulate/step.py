"""The time of a plan when no barrier ends a stage: events of one step, under the plan's times or a cost model's.

A part starts when what it waits for has ended (and its inputs have arrived), and when everything that is before it on
one of its slots has ended: by the stages, with backward in exactly the reverse order, or by a schedule. Simulated,
never measured.

Laws, for a plan's own times and no link. Each step is at least as long as the longest chain of dependencies, and as
the busiest slot's work. Without a schedule it is never longer than ``Plan.predicted_ms``, the stages with barriers:
what a part waits for, by dependency or by slot, is in earlier stages, so by induction over the stages everything of
stage k has started when the slowest parts of the stages before it have ended in turn. With a cost model the last law
need not hold: parts of different stages then meet that were not planned to disturb each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mosaic.cost import Cost
from mosaic.cost.communication import GradientSum
from mosaic.graph import ModuleGraph, Part
from mosaic.hardware import Cluster, Link
from mosaic.plan import Placement, Plan
from mosaic.profile import Phase
from mosaic.schedule import Schedule
from mosaic.simulate.order import Work, check_schedule, staged_order, waits_of
from mosaic.simulate.reshard import reshard_ms
from mosaic.simulate.sums import Summed, last_sum_ms

_Lags = Mapping[Work, Mapping[Work, float]]
"""For each work those that it waits for, each with the milliseconds between its end and the earliest start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSpan:
    """One work, on all of its part's ranks."""

    work: Work
    """What runs."""
    start_ms: float
    """Milliseconds since the step's beginning."""
    end_ms: float
    """Milliseconds since the step's beginning."""
    after: Work | None = None
    """What ended last of all that it waited for; None where it waited for nothing."""

    @property
    def module(self) -> str:
        """Name of its module in the graph."""
        return self.work.part.module

    @property
    def phase(self) -> Phase:
        """Half of the step."""
        return self.work.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of a plan."""

    spans: tuple[SimulatedSpan, ...]
    """In the order of their starts."""
    forward_ms: float
    """When all forwards had ended."""
    makespan_ms: float
    """When everything had, the sums of gradients included where they are apart."""

    @property
    def critical(self) -> tuple[SimulatedSpan, ...]:
        """What decided the length of the step: spans that each waited for the one before, from its beginning."""
        spans = {span.work: span for span in self.spans}
        at = max(self.spans, key=lambda span: span.end_ms, default=None)
        chain: list[SimulatedSpan] = []
        while at is not None:
            chain.append(at)
            at = spans[at.after] if at.after is not None else None
        return tuple(reversed(chain))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """What a simulated step takes into account beyond a plan's own times."""

    cost: Cost | None = None
    """Asked for each module's time beside those that really run beside it; None keeps the times of the plan."""
    network: Cluster | Link | None = None
    """Between devices, for the bytes of the graph's edges; None moves data in no time."""
    sums: Callable[[str, int], GradientSum] | None = None
    """Of a module at a degree: its gradients are summed on the network that all share, and what the plan's times have
    of it is left out; None keeps the times of the plan. Goes with a plan's own times."""

    def __post_init__(self) -> None:
        if self.cost is not None and self.sums is not None:
            raise ValueError("cost and sums: a cost model's times have sums in them; give one of both")


def simulate(
    plan: Plan, graph: ModuleGraph, model: StepModel | None = None, schedule: Schedule | None = None
) -> SimulatedStep:
    """Simulates one step.

    Args:
        plan: Where parts run; its times are those of one microbatch.
        graph: What feeds what.
        model: What else counts.
        schedule: When they run; by default stage after stage, with one microbatch.

    Raises:
        InvalidPlanError: The plan does not cover the graph.
        InvalidScheduleError: The schedule does not run the plan.
    """
    plan.check_covers(graph)
    model = model or StepModel()
    order = staged_order(plan) if schedule is None else check_schedule(schedule, plan, graph)
    placed = {placement.part: placement if model.sums is None else _bare(placement) for placement in plan.placements}
    lags = _lags(order, placed, graph, plan, model.network, 1 if schedule is None else schedule.num_microbatches)
    spans = _run(lags, _lengths(placed, model.cost))
    return SimulatedStep(
        spans=spans,
        forward_ms=max((span.end_ms for span in spans if span.phase is Phase.FORWARD), default=0.0),
        makespan_ms=max([*(span.end_ms for span in spans), _summed_ms(spans, placed, model)], default=0.0),
    )


def _bare(placement: Placement) -> Placement:
    """A placement whose backward has no sum of gradients."""
    return replace(placement, backward_ms=max(0.0, placement.backward_ms - placement.reduce_ms), reduce_ms=0.0)


def _summed_ms(spans: Sequence[SimulatedSpan], placed: Mapping[Part, Placement], model: StepModel) -> float:
    """When the last sum has ended; of several microbatches' backwards, the last one sums."""
    if model.sums is None:
        return 0.0
    last = {span.work.part: span for span in spans if span.phase is Phase.BACKWARD}
    parts = []
    for part, span in last.items():
        devices = placed[part].devices
        whole = model.sums(part.module, len(devices))
        buckets = max(1, -(-whole.buckets * part.count // part.total))  # a slice's are as large as its module's
        own = replace(whole, time_ms=part.share * whole.time_ms, buckets=buckets)
        parts.append(Summed(start_ms=span.start_ms, end_ms=span.end_ms, devices=devices, own=own))
    return last_sum_ms(parts)


def _lags(
    order: Sequence[Work],
    placed: Mapping[Part, Placement],
    graph: ModuleGraph,
    plan: Plan,
    network: Cluster | Link | None,
    num_microbatches: int,
) -> _Lags:
    """What each work waits for, by slots and by need, in the given order."""
    waits = waits_of(plan, graph, num_microbatches)
    holders: dict[tuple[int, int], Work] = {}
    found: dict[Work, dict[Work, float]] = {}
    for work in order:
        lags = found[work] = {}
        for cell in placed[work.part].cells:
            if cell in holders:
                lags[holders[cell]] = 0.0
            holders[cell] = work
        for other, edge in waits[work].items():
            lag = 0.0
            if network is not None and edge is not None and edge.num_bytes:
                lag = reshard_ms(placed[other.part], placed[work.part], edge.num_bytes, network)
            lags[other] = max(lag, lags.get(other, 0.0))
    return found


def _run(lags: _Lags, length: Callable[[Work, Collection[Work]], float]) -> tuple[SimulatedSpan, ...]:
    """Starts each work as soon as it may; its speed follows what runs beside it."""
    rank = {work: index for index, work in enumerate(lags)}
    missing = {work: len(waits) for work, waits in lags.items()}
    behind: dict[Work, list[Work]] = {work: [] for work in lags}
    for work, waits in lags.items():
        for other in waits:
            behind[other].append(work)
    coming = [(0.0, rank[work], work) for work, count in missing.items() if not count]
    heapq.heapify(coming)
    started: dict[Work, float] = {}
    ended: dict[Work, float] = {}
    left: dict[Work, float] = {}  # share of its work that each running one has still to do
    now = 0.0
    while coming or left:
        while coming and coming[0][0] <= now:
            _, _, work = heapq.heappop(coming)
            started[work], left[work] = now, 1.0
        took = {work: length(work, left) for work in left}
        until = {work: now + left[work] * took[work] for work in left}
        then = min([*until.values(), *(at_ms for at_ms, _, _ in coming[:1])])
        for work in tuple(left):
            if until[work] > then:
                left[work] -= (then - now) / took[work]
                continue
            ended[work] = until[work]
            del left[work]
            for other in behind[work]:
                missing[other] -= 1
                if not missing[other]:
                    at_ms = max(ended[one] + lag for one, lag in lags[other].items())
                    heapq.heappush(coming, (at_ms, rank[other], other))
        now = then
    spans = []
    for work, start_ms in started.items():
        waits = lags[work]
        after = max(waits, key=lambda other: ended[other] + waits[other], default=None)
        spans.append(SimulatedSpan(work=work, start_ms=start_ms, end_ms=ended[work], after=after))
    return tuple(sorted(spans, key=lambda span: span.start_ms))


def _lengths(placed: Mapping[Part, Placement], cost: Cost | None) -> Callable[[Work, Collection[Work]], float]:
    """Returns what a whole work takes while the given ones run."""
    known: dict[tuple[Part, Phase, frozenset[Part]], float] = {}

    def length_ms(work: Work, running: Collection[Work]) -> float:
        own = placed[work.part]
        if cost is None:
            return own.forward_ms if work.phase is Phase.FORWARD else own.backward_ms
        others = frozenset() if cost.interference.is_zero else frozenset(other.part for other in running) - {work.part}
        key = work.part, work.phase, others
        if key not in known:
            known[key] = work.part.share * max(
                cost.placed_ms(own.module, work.phase, own.degree, own.quota, beside=_beside(device, others, placed))
                for device in own.devices
            )
        return known[key]

    return length_ms


def _beside(device: int, others: Collection[Part], placed: Mapping[Part, Placement]) -> list[tuple[str, int]]:
    """Modules and quotas of those parts that are on a device."""
    return sorted((part.module, placed[part].quota) for part in others if device in placed[part].devices)
