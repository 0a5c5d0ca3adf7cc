"""Models whose true accuracy is known: a row is right where a normal number falls below what the model can do.

What makes a row hard is partly its own, partly its group's, and partly a matter of luck of the version at hand, which
changes a little from day to day. The accuracy on rows not seen yet is known without any of the gate's formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from mosaic.retrain.gate import Scores
from mosaic.retrain.gate.scores import RowSet

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Where rows come from."""

    cluster_size: int = 1
    """Rows of a group."""
    alike: float = 0.3
    """Share of a row's hardness that it has in common with its group."""
    lasting: float = 0.5
    """Share of a row's hardness that is the same for every version."""
    kept: float = 0.97
    """Of the rest, what a version has in common with the one before."""


class Rows:
    """Rows drawn from a population, and the luck of the version at hand on each of them."""

    def __init__(self, population: Population, num_rows: int, draw: np.random.Generator) -> None:
        self.population, self.draw = population, draw
        self.cluster = np.arange(num_rows) // population.cluster_size
        self.hardness = self._new()
        self.luck = self._new()

    def next_luck(self) -> NDArray[np.float64]:
        """Returns the luck of a version trained from the one at hand."""
        kept = self.population.kept
        return kept * self.luck + np.sqrt(1 - kept**2) * self._new()

    def right(self, accuracy: float | NDArray[np.float64], luck: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns 1 for the rows on which a version of this true accuracy is right, and 0 for the others."""
        lasting = self.population.lasting
        level = np.vectorize(NORMAL.inv_cdf)(accuracy)
        return (np.sqrt(lasting) * self.hardness + np.sqrt(1 - lasting) * luck < level).astype(np.float64)

    def _new(self) -> NDArray[np.float64]:
        alike = self.population.alike if self.population.cluster_size > 1 else 0.0
        groups = self.draw.standard_normal(int(self.cluster[-1]) + 1)[self.cluster]
        return np.sqrt(alike) * groups + np.sqrt(1 - alike) * self.draw.standard_normal(len(self.cluster))


def scores(version: str, rows: RowSet, drawn: Rows, right: NDArray[np.float64], **columns: Sequence[str]) -> Scores:
    """Returns what ``score(model, batch)`` would have given for rows."""
    return Scores.of(version, rows, rows, {"value": right, "cluster": drawn.cluster, **columns})
