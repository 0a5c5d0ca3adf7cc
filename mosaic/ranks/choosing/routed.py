"""What really travels between ranks under a plan, where results go straight on: bytes, and times predicted of them.

A solver counts every result as going home, since it does not know yet where the modules that take it will run
(``mosaic.cost.communication.ranked``): an upper bound. Once a plan is there, its ways are known, and are those of the engine
(``mosaic.ranks.rows.ways``). The busiest rank of a way sends or gets so many rows, with so many others::

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
from mosaic.engine.finding.find import Finding
from mosaic.engine.finding.handovers import Handover
from mosaic.hardware import Link
from mosaic.plan import Placement, Plan, Stage
from mosaic.ranks.calls.handing import alike_on_all, chosen_straight, stops_of
from mosaic.ranks.meeting.world import World
from mosaic.ranks.rows.layout import Transfer
from mosaic.ranks.rows.ways import Ways
from mosaic.ranks.running.activate import Examined

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
        finding: Its modules.
        examined: What the sample showed beyond them.
        handovers: Results that may go straight; the same on all ranks, or none.
        size: Ranks, of which each holds as many rows as its sample.
    """

    def __init__(self, finding: Finding, examined: Examined, handovers: Sequence[Handover], size: int) -> None:
        self._subjects = finding.subjects
        self._batched = examined.batched
        self._templates = {name: template for name, (template, _) in examined.learned.items()}
        self._handovers = tuple(handovers)
        self._size = size

    @staticmethod
    def agreed(finding: Finding, examined: Examined, world: World, *, direct: bool) -> Routes:
        """Asks all ranks what their samples showed; every rank calls it."""
        handovers = alike_on_all(finding.handovers, world)
        return Routes(finding, examined, handovers if direct else (), world.size)

    def of(self, plan: Plan) -> list[Routed]:
        """Returns all that travels in a step of the sample, but for sums of parameters' gradients."""
        members = {placed.module: tuple(sorted(placed.devices)) for placed in plan.placements}
        known = (self._subjects, members, self._batched, self._templates)
        handed = chosen_straight(self._handovers, *known, self._size)
        ways = Ways(stops_of(handed, *known))
        found = []
        for subject in self._subjects:
            name = subject.name
            leaves = flatten((subject.args, subject.kwargs))[0]
            cut = [index for index, has_rows in enumerate(self._batched[name]) if has_rows]
            held = (len(leaves[cut[0]]),) * self._size
            taken, given = ways.stops[name].taken, ways.stops[name].given
            weights: dict[tuple[str | None, bool, Direction], float] = defaultdict(float)
            for index in cut:
                each = leaves[index].nbytes / max(1, len(leaves[index]))
                weights[taken.get(index), True, "forward"] += each
                weights[taken.get(index), True, "backward"] += each * leaves[index].requires_grad
            template = self._templates[name]
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
