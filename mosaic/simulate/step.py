"""Simulates the step of a plan without barriers between stages.

A part starts when its inputs and the preceding parts on its slots have ended. Slots run forwards in the order of the
stages and backwards in reverse order. Dependencies are

* forward: the forwards that feed it,
* backward: its own forward, and the backwards of the parts that it feeds. The backward of a part that feeds nothing
  waits for the forwards of all such parts, because the loss needs every output.

With a plan's own times, a step is at least as long as the critical path and as the busiest slot's work, and at most
``Plan.predicted_ms``, which has barriers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from mosaic.cost.communication import GradientSum
from mosaic.graph import ModuleGraph, Part
from mosaic.plan import Plan
from mosaic.profile import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSpan:
    """One part's forward or backward on all of its ranks, in milliseconds since the start of the step."""

    part: Part
    phase: Phase
    devices: tuple[int, ...]
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of a plan."""

    spans: tuple[SimulatedSpan, ...]
    """All forwards, then all backwards, in the order of execution on the slots."""
    makespan_ms: float
    """End of the step, including simulated gradient reductions."""


def simulate(plan: Plan, graph: ModuleGraph, *, sums: Callable[[str, int], GradientSum] | None = None) -> SimulatedStep:
    """Simulates one step with the plan's own times.

    Args:
        plan: Placements and their times.
        graph: Edges between modules.
        sums: Gradient reduction of a module at a degree. Reductions then share their devices' network, and replace
            those in the plan's times.

    Raises:
        InvalidPlanError: The plan does not cover the graph.
    """
    plan.check_covers(graph)
    inputs = _inputs(plan, graph)
    outputs: dict[Part, list[Part]] = {part: [] for part in inputs}
    for part, sources in inputs.items():
        for source in sources:
            outputs[source].append(part)
    last = [part for part, targets in outputs.items() if not targets]
    slot_free_ms: defaultdict[tuple[int, int], float] = defaultdict(float)
    end_ms: dict[tuple[Part, Phase], float] = {}
    spans = []
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    for phase, placements in ((forward, plan.placements), (backward, plan.placements[::-1])):
        for placement in placements:
            part = placement.part
            if phase is forward:
                own_ms, waits = placement.forward_ms, [(source, forward) for source in inputs[part]]
            else:
                own_ms = max(0.0, placement.backward_ms - (0.0 if sums is None else placement.reduce_ms))
                waits = [(target, backward) for target in outputs[part]] or [(other, forward) for other in last]
                waits.append((part, forward))
            start_ms = max([*(end_ms[wait] for wait in waits), *(slot_free_ms[cell] for cell in placement.cells)])
            end_ms[part, phase] = start_ms + own_ms
            slot_free_ms.update(dict.fromkeys(placement.cells, start_ms + own_ms))
            spans.append(
                SimulatedSpan(
                    part=part, phase=phase, devices=placement.devices, start_ms=start_ms, end_ms=start_ms + own_ms
                )
            )
    backwards = ((span, sums(span.part.module, len(span.devices))) for span in spans[len(inputs) :]) if sums else ()
    return SimulatedStep(spans=tuple(spans), makespan_ms=max([*end_ms.values(), last_sum_ms(backwards)]))


def _inputs(plan: Plan, graph: ModuleGraph) -> dict[Part, list[Part]]:
    """Returns the dependencies of each part: the parts that feed its module, and its module's earlier layers."""
    parts: dict[str, list[Part]] = {}
    for placement in plan.placements:
        parts.setdefault(placement.module, []).append(placement.part)
    inputs: dict[Part, list[Part]] = {own[0]: [] for own in parts.values()}
    for own in parts.values():
        inputs |= {later: [earlier] for earlier, later in pairwise(own)}
    for edge in graph.edges:
        inputs[parts[edge.target][0]].append(parts[edge.source][-1])
    return inputs


def last_sum_ms(backwards: Iterable[tuple[SimulatedSpan, GradientSum]]) -> float:
    """Returns the end of the last gradient bucket, in milliseconds; 0 without reductions.

    Modules of one device share its network. A module's buckets become ready at equal intervals of its backward. Each is
    reduced as soon as all of its devices have finished earlier ones, like kernels on one stream::

        a backward  |  1  |  2  |                      b backward  |    1    |    2    |      beside it
        network           |--a1--|--b1--|--a2--|--b2--|

    Args:
        backwards: Each part's backward with its module's reduction; a slice has its share, in buckets of equal size.
    """
    ready = []
    for index, (span, reduction) in enumerate(backwards):
        buckets = max(1, -(-reduction.buckets * span.part.count // span.part.total))
        bucket_ms = span.part.share * reduction.time_ms / buckets
        length_ms = span.end_ms - span.start_ms
        for bucket in range(1, buckets + 1) if bucket_ms > 0 else ():
            ready.append((span.start_ms + length_ms * bucket / buckets, index, bucket_ms, span.devices))
    free_ms: defaultdict[int, float] = defaultdict(float)
    for ready_ms, _, bucket_ms, devices in sorted(ready):
        start_ms = max(ready_ms, *(free_ms[device] for device in devices))
        free_ms.update(dict.fromkeys(devices, start_ms + bucket_ms))
    return max(free_ms.values(), default=0.0)
