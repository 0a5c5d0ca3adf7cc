"""The time of a plan's step when no barrier ends a stage. Simulated, never measured.

A part starts as soon as everything it waits for has ended and its inputs have arrived: the parts that feed it, and
whatever precedes it on one of its slots. Slots run forwards in the order of the stages and backwards in exactly the
reverse order. Dependencies are

* forward: the forwards that feed it,
* backward: its own forward, and the backwards of the parts that it feeds. The backward of a part that feeds nothing
  waits for the forwards of all such parts, because the loss needs every output.

Laws, for a plan's own times without a network: a step is at least as long as the longest chain of dependencies and as
the busiest slot's work, and never longer than ``Plan.predicted_ms``, the stages with barriers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mosaic.cost.communication import GradientSum
from mosaic.graph import Edge, ModuleGraph, Part
from mosaic.hardware import Cluster, Link, Message
from mosaic.plan import Placement, Plan
from mosaic.profile import Phase


@dataclass(frozen=True, slots=True)
class Work:
    """One part's forward or backward, which all of its ranks do together."""

    phase: Phase
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSpan:
    """One work; times are milliseconds since the step's beginning."""

    work: Work
    start_ms: float
    end_ms: float

    @property
    def module(self) -> str:
        """Name of the module in the graph."""
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
    """End of the last forward."""
    makespan_ms: float
    """End of the step, sums of gradients included where they are simulated."""


def simulate(
    plan: Plan,
    graph: ModuleGraph,
    *,
    network: Cluster | Link | None = None,
    sums: Callable[[str, int], GradientSum] | None = None,
) -> SimulatedStep:
    """Simulates one step under the plan's own times.

    Args:
        plan: Placements and their times.
        graph: Edges between modules.
        network: Carries the bytes of the graph's edges between devices; None moves data in no time.
        sums: Sum of gradients of a module at a degree. The sums then share the network of their devices, in place of
            the part of the plan's times that reduces gradients.

    Raises:
        InvalidPlanError: The plan does not cover the graph.
    """
    plan.check_covers(graph)
    placed = {placement.part: placement if sums is None else _without_sum(placement) for placement in plan.placements}
    waits = _waits(plan, graph)
    forwards = [Work(Phase.FORWARD, part) for part in placed]
    order = (*forwards, *(Work(Phase.BACKWARD, work.part) for work in reversed(forwards)))
    slot_free_ms: defaultdict[tuple[int, int], float] = defaultdict(float)
    end_ms: dict[Work, float] = {}
    spans = []
    for work in order:
        placement = placed[work.part]
        start_ms = max((slot_free_ms[slot] for slot in placement.cells), default=0.0)
        for other, edge in waits[work].items():
            lag_ms = 0.0
            if network is not None and edge is not None and edge.num_bytes:
                lag_ms = reshard_ms(placed[other.part], placement, edge.num_bytes, network)
            start_ms = max(start_ms, end_ms[other] + lag_ms)
        own_ms = placement.forward_ms if work.phase is Phase.FORWARD else placement.backward_ms
        end_ms[work] = start_ms + own_ms
        slot_free_ms.update(dict.fromkeys(placement.cells, end_ms[work]))
        spans.append(SimulatedSpan(work=work, start_ms=start_ms, end_ms=end_ms[work]))
    summed_ms = last_sum_ms(_summed(spans, placed, sums)) if sums is not None else 0.0
    return SimulatedStep(
        spans=tuple(sorted(spans, key=lambda span: span.start_ms)),
        forward_ms=max((end_ms[work] for work in forwards), default=0.0),
        makespan_ms=max([*end_ms.values(), summed_ms], default=0.0),
    )


def _without_sum(placement: Placement) -> Placement:
    return replace(placement, backward_ms=max(0.0, placement.backward_ms - placement.reduce_ms), reduce_ms=0.0)


def _waits(plan: Plan, graph: ModuleGraph) -> Mapping[Work, Mapping[Work, Edge | None]]:
    """Each work's dependencies, with the edge whose data it waits for, if any."""
    parts: dict[str, list[Part]] = {}
    for placement in plan.placements:
        parts.setdefault(placement.module, []).append(placement.part)
    inputs: dict[Part, dict[Part, Edge | None]] = {part: {} for own in parts.values() for part in own}
    for own in parts.values():
        for earlier, later in pairwise(own):
            inputs[later][earlier] = None
    for edge in graph.edges:
        inputs[parts[edge.target][0]][parts[edge.source][-1]] = edge
    outputs: dict[Part, dict[Part, Edge | None]] = {part: {} for part in inputs}
    for part, sources in inputs.items():
        for source, source_edge in sources.items():
            outputs[source][part] = source_edge
    loss = [part for part, targets in outputs.items() if not targets]
    waits: dict[Work, dict[Work, Edge | None]] = {}
    for part in inputs:
        waits[Work(Phase.FORWARD, part)] = {Work(Phase.FORWARD, at): edge for at, edge in inputs[part].items()}
        after: dict[Work, Edge | None] = {Work(Phase.BACKWARD, at): edge for at, edge in outputs[part].items()}
        after = after or dict.fromkeys(Work(Phase.FORWARD, end) for end in loss)
        waits[Work(Phase.BACKWARD, part)] = {Work(Phase.FORWARD, part): None, **after}
    return waits


def reshard_ms(source: Placement, target: Placement, num_bytes: int, network: Cluster | Link) -> float:
    """Returns the time until every device of ``target`` has its share of the output of ``source``, in milliseconds.

    Each of d devices has 1/d of the batch, in the order of the devices. Data that a device already has does not move.
    The device or the NIC that sends or receives most decides. Nothing else uses the network meanwhile.
    """
    return network.exchange_ms(list(_moved(source.devices, target.devices, num_bytes)))


def _moved(sources: Sequence[int], targets: Sequence[int], num_bytes: int) -> Iterator[Message]:
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            # In units of 1 / (both degrees), so that equal shares are equal.
            low = max(i * len(targets), j * len(sources))
            high = min((i + 1) * len(targets), (j + 1) * len(sources))
            if source != target and high > low:
                share = (high - low) / (len(sources) * len(targets))
                yield Message(source=source, target=target, num_bytes=share * num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSum:
    """The sum of one part's gradients."""

    start_ms: float
    """Start of its backward."""
    end_ms: float
    """End of its backward."""
    devices: tuple[int, ...]
    """Devices that sum."""
    own: GradientSum
    """Duration and buckets."""


def _summed(
    spans: Iterable[SimulatedSpan], placed: Mapping[Part, Placement], sums: Callable[[str, int], GradientSum]
) -> Iterator[PartSum]:
    for span in spans:
        if span.phase is Phase.BACKWARD:
            part, devices = span.work.part, placed[span.work.part].devices
            whole = sums(part.module, len(devices))
            buckets = max(1, -(-whole.buckets * part.count // part.total))  # a slice's are as large as its module's
            own = replace(whole, time_ms=part.share * whole.time_ms, buckets=buckets)
            yield PartSum(start_ms=span.start_ms, end_ms=span.end_ms, devices=devices, own=own)


def last_sum_ms(parts: Iterable[PartSum]) -> float:
    """Returns when the last bucket has been summed, in milliseconds; 0 if nothing is summed.

    Modules of one device share its network, so their buckets wait for each other. A module's buckets become ready in
    equal parts of its backward. Each is summed as soon as all of its devices have ended the sums that were ready
    before, as kernels on one stream are::

        a backward  |  1  |  2  |                      b backward  |    1    |    2    |      beside it
        network           |--a1--|--b1--|--a2--|--b2--|
    """
    ready = sorted(
        (part.start_ms + (part.end_ms - part.start_ms) * bucket / part.own.buckets, index, part)
        for index, part in enumerate(parts)
        if part.own.time_ms > 0
        for bucket in range(1, part.own.buckets + 1)
    )
    free_ms: defaultdict[int, float] = defaultdict(float)
    for ready_ms, _, part in ready:
        start_ms = max(ready_ms, *(free_ms[device] for device in part.devices))
        free_ms.update(dict.fromkeys(part.devices, start_ms + part.own.time_ms / part.own.buckets))
    return max(free_ms.values(), default=0.0)
