"""Which results go straight from one module's ranks to another's: where the sample's step allows it and sends less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mosaic.engine.calls.structure import flatten
from mosaic.engine.finding.handovers import Handover
from mosaic.profiler import Subject
from mosaic.ranks.calls.ranked import Ranked, Template
from mosaic.ranks.meeting.world import World
from mosaic.ranks.rows.ways import Stop, Ways

_NOMINAL_ROWS = 60
"""Of each rank, in the comparison of ways: parts of it over as many as six members are whole."""


RanksOf = Mapping[str, tuple[int, ...]]
"""Ranks that run each module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandingFacts:
    """What decides which results may go straight, beside the ranks that run each module."""

    subjects: Sequence[Subject]
    """The modules, in the order of their calls."""
    batched: Mapping[str, Sequence[bool]]
    """For each module, which of its arguments have a row for each sample."""
    templates: Mapping[str, Template]
    """What each module returns."""

    def handed(self, handovers: Sequence[Handover], members: RanksOf, world: World) -> tuple[Handover, ...]:
        """Returns which of this rank's handovers go straight on; the same on all ranks, all of which call it."""
        chosen = self.chosen(alike_on_all(handovers, world), members, world.size)
        found: Sequence[tuple[str, int, str, int]] = world.first_says([tuple(asdict(one).values()) for one in chosen])
        return tuple(Handover(source=s, result=r, target=t, argument=a) for s, r, t, a in found)

    def chosen(self, alike: Sequence[Handover], members: RanksOf, num_ranks: int) -> tuple[Handover, ...]:
        """Returns which of these results go straight on since that sends less; asks no other rank."""
        chosen = [one for one in alike if self.batched[one.target][one.argument]]
        held = (_NOMINAL_ROWS,) * num_ranks

        def num_bytes(handed: Sequence[Handover]) -> float:
            ways = self.ways(handed, members)
            return ways.cost(held, {name: ways.layout(name, held) for name in ways.stops})

        for one in list(chosen):
            without = [other for other in chosen if other is not one]
            if num_bytes(without) <= num_bytes(chosen):
                chosen = without
        return tuple(chosen)

    def ways(self, handed: Sequence[Handover], members: RanksOf) -> Ways:
        """Returns the ways of rows if some results go straight on."""
        return Ways({subject.name: self._stop(subject, handed, members) for subject in self.subjects})

    def _stop(self, subject: Subject, handed: Sequence[Handover], members: RanksOf) -> Stop:
        name, template = subject.name, self.templates[subject.name]
        given = frozenset(one.result for one in handed if one.source == name)
        taken = {one.argument: one.source for one in handed if one.target == name}
        home, sources = 0.0, dict.fromkeys(taken.values(), 0.0)
        leaves = flatten((subject.args, subject.kwargs))[0]
        for index, (leaf, cut) in enumerate(zip(leaves, self.batched[name], strict=True)):
            if cut and index in taken:
                sources[taken[index]] += _row_bytes(leaf, leaf.requires_grad)
            elif cut:
                home += _row_bytes(leaf, leaf.requires_grad)
        for index, (leaf, trains) in enumerate(zip(template.leaves, template.differentiable, strict=True)):
            if isinstance(leaf, torch.Tensor) and index not in given:
                home += _row_bytes(leaf, trains)
        return Stop(members=members[name], home_bytes=home, sources=sources, taken=taken, given=given)


def alike_on_all(handovers: Sequence[Handover], world: World) -> tuple[Handover, ...]:
    """Returns those that every rank's sample showed; every rank calls it."""
    told = world.tell([tuple(asdict(one).values()) for one in handovers])
    return tuple(one for one in handovers if all(tuple(asdict(one).values()) in theirs for theirs in told))


def hand_over(ranked: Mapping[str, Ranked], handed: Sequence[Handover], ways: Ways) -> None:
    """Has the modules send results straight on."""
    for one in handed:
        ranked[one.target].take_straight(ranked[one.source], one.result, one.argument)
    for module in ranked.values():
        module.ways = ways


def _row_bytes(leaf: Any, trains: bool) -> float:
    return float(leaf.nbytes / max(1, len(leaf)) * (1 + trains))
