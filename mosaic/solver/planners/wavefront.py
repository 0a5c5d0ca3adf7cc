"""Spindle's wavefront scheduling of one level: waves filled greedily, longer runs sliced to the shortest one's end.

Spindle (arXiv 2409.03365), section 3.4. Where the paper names no rule: which tuples a wave takes is the released
planner's (most devices first, then longest, whatever still fits); the order *extend, then align* is the paper's (the
released code aligns first and extends by option only); sliced operators are rounded to the nearest number, at least
one; neighbouring waves that hold the same MetaOps on as many devices are joined, as in the released code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mosaic.solver.planners.malleable import AslTuple, MetaOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some operators of one MetaOp in one wave."""

    metaop: int
    """Index in the level."""
    degree: int
    """Devices."""
    count: int
    """Operators."""


def schedule_level(
    metaops: Sequence[MetaOp], tuples: Sequence[Sequence[AslTuple]], num_devices: int, *, extend: bool = True
) -> list[list[Slice]]:
    """Cuts the tuples of a level into waves, at most one slice of a MetaOp in each.

    Each wave uses up at least one tuple, so there are no more waves than tuples.

    Args:
        metaops: MetaOps of the level, which do not depend on each other.
        tuples: For each of them, its rounded tuples.
        num_devices: N; no tuple has more.
        extend: Whether devices that a wave leaves idle go to its tuples.
    """
    remaining = [
        Slice(metaop=index, degree=one.degree, count=int(one.count))
        for index, own in enumerate(tuples)
        for one in own
        if one.count > 0
    ]
    waves: list[list[Slice]] = []
    while remaining:
        proposed = _propose(remaining, metaops, num_devices)
        wave = proposed if not extend else _extend(proposed, metaops, num_devices)
        aligned = _align(wave, metaops)
        for before, after in zip(proposed, aligned, strict=True):
            remaining.remove(before)
            if after.count < before.count:  # the rest keeps its own number of devices
                remaining.append(replace(before, count=before.count - after.count))
        waves.append(aligned)
    return _join(waves)


def _length(piece: Slice, metaops: Sequence[MetaOp]) -> float:
    return metaops[piece.metaop].time(piece.degree) * piece.count


def _propose(remaining: Sequence[Slice], metaops: Sequence[MetaOp], num_devices: int) -> list[Slice]:
    """Takes what needs most devices first, then what takes longest, while it fits."""
    chosen: list[Slice] = []
    free = num_devices
    for piece in sorted(remaining, key=lambda one: (-one.degree, -_length(one, metaops), one.metaop)):
        if piece.degree <= free and all(other.metaop != piece.metaop for other in chosen):
            chosen.append(piece)
            free -= piece.degree
    return chosen


def _extend(chosen: Sequence[Slice], metaops: Sequence[MetaOp], num_devices: int) -> list[Slice]:
    """Raises one slice at a time to its next degree, the longest that has room first."""
    wave = list(chosen)
    while True:
        free = num_devices - sum(piece.degree for piece in wave)
        for place in sorted(range(len(wave)), key=lambda index: -_length(wave[index], metaops)):
            larger = [n for n in metaops[wave[place].metaop].degrees if 0 < n - wave[place].degree <= free]
            if larger:
                wave[place] = replace(wave[place], degree=larger[0])
                break
        else:
            return wave


def _align(wave: Sequence[Slice], metaops: Sequence[MetaOp]) -> list[Slice]:
    """Cuts every slice to about the time of the shortest."""
    end = min(_length(piece, metaops) for piece in wave)
    aligned = []
    for piece in wave:
        time = metaops[piece.metaop].time(piece.degree)
        fitting = round(end / time) if time > 0 else piece.count
        aligned.append(replace(piece, count=min(max(fitting, 1), piece.count)))
    return aligned


def _join(waves: Sequence[list[Slice]]) -> list[list[Slice]]:
    """Joins neighbouring waves with the same MetaOps on the same numbers of devices."""
    joined: list[list[Slice]] = []
    for wave in waves:
        ordered = sorted(wave, key=lambda piece: piece.metaop)
        last = joined[-1] if joined else []
        if [(p.metaop, p.degree) for p in ordered] == [(p.metaop, p.degree) for p in last]:
            joined[-1] = [replace(a, count=a.count + b.count) for a, b in zip(last, ordered, strict=True)]
        else:
            joined.append(ordered)
    return joined
