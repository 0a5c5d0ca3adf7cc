"""What a plan takes when no barrier ends a stage: events of one step, under the plan's times or a cost model's.

A module starts when what feeds it has ended (and its outputs have arrived), and when every module that the plan puts
before it on one of its slots has ended. Backward runs in exactly the reverse order, after all forwards: a loss needs
every output. Simulated, never measured.

Laws, for a plan's own times and no link. Each step is at least as long as the longest chain of dependencies, and as
the busiest slot's work. It is never longer than ``Plan.predicted_ms``, the stages with barriers: what a module waits
for, by dependency or by slot, is in earlier stages, so by induction over the stages everything of stage k has started
when the slowest modules of the stages before it have ended in turn. With a cost model the last law need not hold:
modules of different stages then meet that were not planned to disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mosaic.cost import Cost
from mosaic.graph import ModuleGraph
from mosaic.hardware import Link
from mosaic.plan import Placement, Plan
from mosaic.profile import Phase
from mosaic.simulate.reshard import reshard_ms
from mosaic.solver.memory.footprint import Footprint, peak_bytes

Waits = Mapping[str, Mapping[str, float]]
"""For each module those that it waits for, each with the milliseconds between its end and the earliest start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSpan:
    """One phase of one module, on all of its devices."""

    module: str
    """Name in the graph."""
    phase: Phase
    """Half of the step."""
    start_ms: float
    """Milliseconds since the step's beginning."""
    end_ms: float
    """Milliseconds since the step's beginning."""
    after: str | None = None
    """The module whose end let it start: what it depends on, or what held its slots; None at a phase's beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of a plan."""

    spans: tuple[SimulatedSpan, ...]
    """Forwards, then backwards; each in the order of their starts."""
    forward_ms: float
    """When all forwards had ended."""
    makespan_ms: float
    """When everything had."""
    peak_bytes: tuple[int, ...]
    """Most memory in use on each device at any time of the step; zeros where no footprints were given."""

    @property
    def critical(self) -> tuple[SimulatedSpan, ...]:
        """What decided the length of the step: spans that each waited for the one before, from its beginning."""
        chain: list[SimulatedSpan] = []
        for phase in reversed(tuple(Phase)):
            spans = {span.module: span for span in self.spans if span.phase is phase}
            at = max(spans.values(), key=lambda span: span.end_ms, default=None)
            while at is not None:
                chain.append(at)
                at = spans[at.after] if at.after is not None else None
        return tuple(reversed(chain))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """What a simulated step takes into account beyond a plan's own times."""

    cost: Cost | None = None
    """Asked for each module's time beside those that really run beside it; None keeps the times of the plan."""
    link: Link | None = None
    """Between any two devices; None moves data in no time."""
    edge_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Bytes of a whole batch that cross an edge (source, target), the same in backward."""
    footprints: Mapping[str, Footprint] = field(default_factory=dict)
    """What modules hold on each of their devices."""


def simulate(plan: Plan, graph: ModuleGraph, model: StepModel | None = None) -> SimulatedStep:
    """Simulates one step of a plan.

    Raises:
        InvalidPlanError: The plan does not cover the graph.
    """
    plan.check_covers(graph)
    model = model or StepModel()
    forward = run_phase(plan.placements, Phase.FORWARD, graph, model)
    forward_ms = max((span.end_ms for span in forward), default=0.0)
    backward = run_phase(plan.placements, Phase.BACKWARD, graph, model, begin_ms=forward_ms)
    spans = (*forward, *backward)
    return SimulatedStep(
        spans=spans,
        forward_ms=forward_ms,
        makespan_ms=max((span.end_ms for span in spans), default=0.0),
        peak_bytes=peak_bytes(plan, model.footprints, {(s.module, s.phase): (s.start_ms, s.end_ms) for s in spans}),
    )


def run_phase(
    placements: Sequence[Placement], phase: Phase, graph: ModuleGraph, model: StepModel, *, begin_ms: float = 0.0
) -> tuple[SimulatedSpan, ...]:
    """Runs one phase of modules; of two that share a slot the one listed first runs first, in backward last."""
    order = placements if phase is Phase.FORWARD else tuple(reversed(placements))
    waits = _waits(order, phase, graph, model)
    lengths = _lengths(order, phase, model.cost)
    ended: dict[str, float] = {}
    started: dict[str, tuple[float, str | None]] = {}
    left: dict[str, float] = {}  # share of its work that each running module has still to do
    now = begin_ms
    while len(ended) < len(order):
        coming = _coming(order, waits, started, ended, begin_ms)
        for name, (at_ms, after) in coming.items():
            if at_ms <= now:
                started[name] = (now, after)
                left[name] = 1.0
        took = {name: lengths(name, left) for name in left}
        until = {name: now + left[name] * took[name] for name in left}
        now_next = min([*until.values(), *(at_ms for at_ms, _ in coming.values() if at_ms > now)])
        for name in tuple(left):
            if until[name] <= now_next:
                ended[name] = max(until[name], now)
                del left[name]
            else:
                left[name] -= (now_next - now) / took[name]
        now = now_next
    spans = [
        SimulatedSpan(module=name, phase=phase, start_ms=at_ms, end_ms=ended[name], after=after)
        for name, (at_ms, after) in started.items()
    ]
    return tuple(sorted(spans, key=lambda span: span.start_ms))


def _coming(
    order: Sequence[Placement],
    waits: Waits,
    started: Mapping[str, object],
    ended: Mapping[str, float],
    begin_ms: float,
) -> dict[str, tuple[float, str | None]]:
    """Modules that wait for nothing that has not ended: when each may start, and what decided that."""
    found: dict[str, tuple[float, str | None]] = {}
    for placement in order:
        name = placement.module
        if name in started or not all(other in ended for other in waits[name]):
            continue
        last: str | None = None
        at_ms = begin_ms
        for other, lag in waits[name].items():
            if last is None or ended[other] + lag > at_ms:
                at_ms, last = ended[other] + lag, other
        found[name] = (at_ms, last)
    return found


def _waits(order: Sequence[Placement], phase: Phase, graph: ModuleGraph, model: StepModel) -> Waits:
    by_name = {placement.module: placement for placement in order}
    waits: dict[str, dict[str, float]] = {name: {} for name in by_name}
    holders: dict[tuple[int, int], str] = {}
    for placement in order:
        for cell in placement.cells:
            if cell in holders:
                waits[placement.module][holders[cell]] = 0.0
            holders[cell] = placement.module
    for edge in graph.edges:
        source, target = (edge.source, edge.target) if phase is Phase.FORWARD else (edge.target, edge.source)
        num_bytes = model.edge_bytes.get((edge.source, edge.target), 0)
        lag = reshard_ms(by_name[source], by_name[target], num_bytes, model.link) if model.link else 0.0
        waits[target][source] = max(lag, waits[target].get(source, 0.0))
    return waits


def _lengths(
    order: Sequence[Placement], phase: Phase, cost: Cost | None
) -> Callable[[str, Mapping[str, float]], float]:
    """Returns what a module's whole phase takes while the given ones run."""
    by_name = {placement.module: placement for placement in order}
    known: dict[tuple[str, frozenset[str]], float] = {}

    def own_ms(name: str, running: Mapping[str, float]) -> float:
        placement = by_name[name]
        if cost is None:
            return placement.forward_ms if phase is Phase.FORWARD else placement.backward_ms
        key = (name, frozenset() if cost.interference.is_zero else frozenset(running))
        if key not in known:
            known[key] = max(
                cost.placed_ms(
                    name,
                    phase,
                    placement.degree,
                    placement.quota,
                    beside=[(n, by_name[n].quota) for n in sorted(key[1]) if n != name and g in by_name[n].devices],
                )
                for g in placement.devices
            )
        return known[key]

    return own_ms
