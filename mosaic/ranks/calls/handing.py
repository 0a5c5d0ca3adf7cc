"""Which results go straight from one module's ranks to another's: where the sample's step allows it and sends less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
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


def handed_straight(
    handovers: Sequence[Handover],
    subjects: Sequence[Subject],
    members: Mapping[str, tuple[int, ...]],
    batched: Mapping[str, Sequence[bool]],
    templates: Mapping[str, Template],
    world: World,
) -> tuple[Handover, ...]:
    """Returns which results go straight on; the same on all ranks, all of which call it.

    Args:
        handovers: What this rank's sample showed.
        subjects: The modules, in the order of their calls.
        members: Ranks that run each.
        batched: For each module, which of its arguments have a row for each sample.
        templates: What each module returns.
        world: The ranks.
    """
    alike = alike_on_all(handovers, world)
    chosen = chosen_straight(alike, subjects, members, batched, templates, world.size)
    found: Sequence[tuple[str, int, str, int]] = world.first_says([tuple(asdict(one).values()) for one in chosen])
    return tuple(Handover(source=s, result=r, target=t, argument=a) for s, r, t, a in found)


def alike_on_all(handovers: Sequence[Handover], world: World) -> tuple[Handover, ...]:
    """Returns those that every rank's sample showed; every rank calls it."""
    told = world.tell([tuple(asdict(one).values()) for one in handovers])
    return tuple(one for one in handovers if all(tuple(asdict(one).values()) in theirs for theirs in told))


def chosen_straight(
    alike: Sequence[Handover],
    subjects: Sequence[Subject],
    members: Mapping[str, tuple[int, ...]],
    batched: Mapping[str, Sequence[bool]],
    templates: Mapping[str, Template],
    size: int,
) -> tuple[Handover, ...]:
    """Returns which of these results go straight on since that sends less; asks no other rank. ``size``: ranks."""
    chosen = [one for one in alike if batched[one.target][one.argument]]
    held = (_NOMINAL_ROWS,) * size

    def num_bytes(handed: Sequence[Handover]) -> float:
        ways = Ways(stops_of(handed, subjects, members, batched, templates))
        return ways.cost(held, {name: ways.layout(name, held) for name in ways.stops})

    for one in list(chosen):
        without = [other for other in chosen if other is not one]
        if num_bytes(without) <= num_bytes(chosen):
            chosen = without
    return tuple(chosen)


def stops_of(
    handed: Sequence[Handover],
    subjects: Sequence[Subject],
    members: Mapping[str, tuple[int, ...]],
    batched: Mapping[str, Sequence[bool]],
    templates: Mapping[str, Template],
) -> dict[str, Stop]:
    """Returns what the ways of rows are chosen from, if some results go straight on."""
    stops = {}
    for subject in subjects:
        name, template = subject.name, templates[subject.name]
        given = frozenset(one.result for one in handed if one.source == name)
        taken = {one.argument: one.source for one in handed if one.target == name}
        home, sources = 0.0, dict.fromkeys(taken.values(), 0.0)
        leaves = flatten((subject.args, subject.kwargs))[0]
        for index, (leaf, cut) in enumerate(zip(leaves, batched[name], strict=True)):
            if cut and index in taken:
                sources[taken[index]] += _row_bytes(leaf, leaf.requires_grad)
            elif cut:
                home += _row_bytes(leaf, leaf.requires_grad)
        for index, (leaf, trains) in enumerate(zip(template.leaves, template.differentiable, strict=True)):
            if isinstance(leaf, torch.Tensor) and index not in given:
                home += _row_bytes(leaf, trains)
        stops[name] = Stop(members=members[name], home_bytes=home, sources=sources, taken=taken, given=given)
    return stops


def hand_over(ranked: Mapping[str, Ranked], handed: Sequence[Handover], ways: Ways) -> None:
    """Has the modules send results straight on."""
    for one in handed:
        ranked[one.target].take_straight(ranked[one.source], one.result, one.argument)
    for module in ranked.values():
        module.ways = ways


def _row_bytes(leaf: Any, trains: bool) -> float:
    return float(leaf.nbytes / max(1, len(leaf)) * (1 + trains))
