"""Renewal of frozen rows: each decision on them favours models that do well there by chance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from mosaic.retrain.gate.scores import Scores
from mosaic.retrain.gate.settings import GateSettings
from mosaic.retrain.records import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Frozen rows that change after a promotion."""

    join: tuple[int, ...]
    """Indices of fresh rows that become frozen, with the day in column ``added``; never trained on."""
    leave: tuple[int, ...]
    """Indices of rows that stop being frozen."""


def renewal(frozen: Scores, fresh: Scores, day: str, settings: GateSettings) -> Renewal:
    """Selects rows by whole groups, in an order that depends on the day and the groups' names, not on values.

    Call it after a promotion with that day's held-out rows. Any frozen row may leave, so in time the set mixes rows of
    all promoted days; it keeps ``max_frozen_rows``.
    """
    join = _some(fresh, settings.renew_rows, f"{settings.seed} {day} join")
    surplus = len(frozen.value) + len(join) - settings.max_frozen_rows
    return Renewal(join=join, leave=_some(frozen, max(0, surplus), f"{settings.seed} {day} leave"))


def wear_finding(looks: int, settings: GateSettings) -> Finding:
    """Reports the number of decisions on the frozen rows. A worn set does not refuse."""
    worn = f", and max_looks = {settings.max_looks}: they flatter by now" if looks >= settings.max_looks else ""
    return Finding(name="frozen rows", passed=True, sentence=f"These frozen rows have decided {looks} times{worn}.")


def _some(scores: Scores, count: int, seed: str) -> tuple[int, ...]:
    """Returns rows of whole groups, at most ``count`` of them."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(scores.cluster or map(str, range(len(scores.value)))):
        groups.setdefault(name, []).append(index)

    def fitting() -> Iterator[int]:
        remaining = count
        for name in sorted(groups, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest()):
            if len(groups[name]) <= remaining:
                remaining -= len(groups[name])
                yield from groups[name]

    return tuple(sorted(fitting()))
