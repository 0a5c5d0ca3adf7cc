"""Bytes that really travel between ranks under a plan where results go straight on, and times predicted of them.

A solver counts every result as going home, since it does not know yet where the modules that take it will run
(``mosaic.cost.communication.ranked``): an upper bound. Once a plan is there, its ways are known, and are those of the
engine (``mosaic.ranks.rows.ways``). The busiest rank of a way sends or gets so many rows, with so many others::

    t = others * latency + rows * bytes of a row / bandwidth

for the arguments that come from one place, and for the results that go home; the same for gradients, the other way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mosaic.engine.calls.structure import flatten
from mosaic.engine.finding.handovers import Handover
from mosaic.hardware import Link
from mosaic.plan import Placement, Plan, Stage
from mosaic.ranks.calls.handing import HandingFacts, alike_on_all
from mosaic.ranks.rows.layout import Transfer
from mosaic.ranks.running.prepare import Prepared

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Messages of one module along one way."""

    module: str
    """For which they are sent."""
    direction: Direction
    """Rows, or their gradients."""
    transfer: Transfer
    """From where to where."""
    row_bytes: float
    """Of one row of all tensors that go this way."""

    @property
    def num_bytes(self) -> float:
        """What all ranks together send."""
        return self.transfer.num_moved * self.row_bytes

    def time_ms(self, link: Link) -> float:
        """Returns how long it takes the busiest rank."""
        moves = self.transfer.moves
        longest = 0.0
        for rank, given in enumerate(moves):
            for counts in (given, [row[rank] for row in moves]):
                rows = [count for other, count in enumerate(counts) if other != rank and count]
                longest = max(
                    longest, len(rows) * link.latency_us / 1e3 + sum(rows) * self.row_bytes / link.gb_per_s / 1e6
                )
        return longest


class Routes:
    """The ways of a model's rows under any plan.

    Args:
        facts: Its modules, and what the sample showed of them.
        handovers: Results that may go straight; the same on all ranks, or none.
        size: Ranks, of which each holds as many rows as its sample.
    """

    def __init__(self, facts: HandingFacts, handovers: Sequence[Handover], size: int) -> None:
        self._facts = facts
        self._handovers = tuple(handovers)
        self._size = size

    @staticmethod
    def agreed(on: Prepared) -> Routes:
        """Asks all ranks what their samples showed; every rank calls it."""
        handovers = alike_on_all(on.finding.handovers, on.world)
        is_straight = on.direct and on.backend.device.kind == "host"
        return Routes(on.handing, handovers if is_straight else (), on.world.size)

    def of(self, plan: Plan) -> list[Routed]:
        """Returns all that travels in a step of the sample, but for sums of parameters' gradients."""
        members = {placed.module: tuple(sorted(placed.devices)) for placed in plan.placements}
        facts = self._facts
        ways = facts.ways(facts.chosen(self._handovers, members, self._size), members)
        found = []
        for subject in facts.subjects:
            name = subject.name
            leaves = flatten((subject.args, subject.kwargs))[0]
            cut = [index for index, has_rows in enumerate(facts.batched[name]) if has_rows]
            held = (len(leaves[cut[0]]),) * self._size
            taken, given = ways.stops[name].taken, ways.stops[name].given
            weights: dict[tuple[str | None, bool, Direction], float] = defaultdict(float)
            for index in cut:
                each = leaves[index].nbytes / max(1, len(leaves[index]))
                weights[taken.get(index), True, "forward"] += each
                weights[taken.get(index), True, "backward"] += each * leaves[index].requires_grad
            template = facts.templates[name]
            for index, (leaf, trains) in enumerate(zip(template.leaves, template.differentiable, strict=True)):
                if isinstance(leaf, torch.Tensor) and index not in given:
                    each = leaf.nbytes / max(1, len(leaf))
                    weights[None, False, "forward"] += each
                    weights[None, False, "backward"] += each * trains
            for (source, there, direction), row_bytes in weights.items():
                way = ways.transfer(source, name, held)
                way = way if there == (direction == "forward") else way.back
                found.append(Routed(module=name, direction=direction, transfer=way, row_bytes=row_bytes))
        return found

    def told(self, plan: Plan, link: Link) -> Plan:
        """Returns a plan whose predicted times have what really travels, in the place of an upper bound."""
        times: dict[tuple[str, Direction], float] = defaultdict(float)
        for one in self.of(plan):
            if one.num_bytes:
                times[one.module, one.direction] += one.time_ms(link)

        def corrected(placed: Placement) -> Placement:
            forward_ms, backward_ms = times[placed.module, "forward"], times[placed.module, "backward"]
            return replace(
                placed,
                forward_ms=max(forward_ms, placed.forward_ms + forward_ms - placed.route_forward_ms),
                backward_ms=max(backward_ms, placed.backward_ms + backward_ms - placed.route_backward_ms),
                route_forward_ms=forward_ms,
                route_backward_ms=backward_ms,
            )

        stages = tuple(Stage(placements=tuple(map(corrected, stage.placements))) for stage in plan.stages)
        return replace(plan, stages=stages)


def sent_bytes(routed: Sequence[Routed]) -> Mapping[tuple[str, Direction], float]:
    """Returns what all ranks together send in a step, by module and direction; only what is not nothing."""
    found: dict[tuple[str, Direction], float] = defaultdict(float)
    for one in routed:
        if one.num_bytes:
            found[one.module, one.direction] += one.num_bytes
    return dict(found)
