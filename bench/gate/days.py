"""Many days on end: each day's version comes from the one in force, and takes its place if the gate lets it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.gate.population import Population, Rows, scores
from mosaic.retrain.gate import Contest, DayScores, GateSettings, decide, renewal


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Days that are simulated."""

    population: Population
    """Where rows come from."""
    rows: int
    """Frozen rows."""
    days: int
    """Number of days."""
    loss: float
    """True loss of each day's version against the one that it was trained from."""
    settings: GateSettings
    """The gate's."""
    anchored: bool = False
    """Whether the first version is the anchor."""
    accuracy: float = 0.95
    """Of the first version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """After the last day."""

    promoted: int
    """Days promoted."""
    accuracy: float
    """Of the version in force, on rows not seen."""
    frozen: float
    """The same on the frozen rows."""


def run_days(chain: Chain, seed: int) -> End:
    """Simulates the days."""
    drawn = Rows(chain.population, chain.rows, np.random.default_rng(seed))
    anchor, accuracy, promoted = drawn.right(chain.accuracy, drawn.luck), chain.accuracy, 0
    for day in range(chain.days):
        luck = drawn.next_luck()
        right = drawn.right(accuracy - chain.loss, luck)
        found = [scores("new", "frozen", drawn, right)]
        found.append(scores("old", "frozen", drawn, drawn.right(accuracy, drawn.luck)))
        found.append(scores("anchor", "frozen", drawn, anchor))
        contest = Contest(
            day="2026-11-22", challenger="new", champion="old", anchor="anchor" if chain.anchored else None
        )
        if decide(DayScores(scores=tuple(found)), contest, chain.settings).passes:
            drawn.luck, accuracy, promoted = luck, accuracy - chain.loss, promoted + 1
            _renew(drawn, anchor, chain, promoted, str(day))
    end = float(np.mean(drawn.right(accuracy, drawn.luck)))
    return End(promoted=promoted, accuracy=accuracy, frozen=end)


def _renew(drawn: Rows, anchor: NDArray[np.float64], chain: Chain, promoted: int, day: str) -> None:
    """Puts rows in the place of others that no decision was made on; ``anchor`` is scored on them too."""
    if not chain.settings.renew_rows:
        return
    fresh = Rows(chain.population, chain.settings.renew_rows, drawn.draw)
    frozen = scores("new", "frozen", drawn, drawn.luck)
    leave = renewal(frozen, scores("new", "fresh", fresh, fresh.luck), day, chain.settings).leave
    places = np.array(leave, dtype=np.int64)
    kept = chain.population.kept**promoted
    before = kept * fresh.luck + np.sqrt(1 - kept**2) * drawn.draw.standard_normal(len(fresh.luck))
    drawn.hardness[places], drawn.luck[places] = fresh.hardness, fresh.luck
    anchor[places] = fresh.right(chain.accuracy, before)
