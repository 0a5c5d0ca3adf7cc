"""The parts of the study: what the gate does over simulated days, against a truth that it does not know."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench.gate.days import Chain, run_days
from bench.gate.population import Population, Rows, scores
from bench.record import Figure, interval
from mosaic.retrain.gate import Contest, DayScores, GateSettings, decide, resolution
from mosaic.retrain.intake.data_check import DataCheckSettings, check_data
from mosaic.retrain.intake.usual import DayFigures, day_figures
from mosaic.retrain.records import Comparison, GateResult

SMALL_CHANGE = Population(kept=0.94)
"""Versions of 95 % accuracy differ on 2 % of rows from day to day."""
LARGE_CHANGE = Population(kept=0.6)
"""On 5 % of rows."""
ACCURACY = 0.95
CONTEST = Contest(day="2026-11-22", challenger="new", champion="old", anchor=None)
Shape = tuple[int, int, float]
"""Rows, rows of a group, margin."""


def margins(shapes: Sequence[Shape], trials: int) -> Iterator[Figure]:
    """How often equal models are refused, and models promoted that lost the margin, or half as much again."""
    for rows, size, margin in shapes:
        population = replace(SMALL_CHANGE, cluster_size=size)
        settings = GateSettings(margin=margin)
        groups = f" in {rows // size} groups" if size > 1 else ""
        where = f"margin {100 * margin:g}, {rows} rows{groups}"
        draw = np.random.default_rng([rows, size])
        passed = [one_day(population, rows, 0.0, settings, draw).passes for _ in range(trials)]
        yield share(f"{where}: equal models refused, %", [not one for one in passed])
        said = [1 - _said_power(population, rows, settings, draw) for _ in range(min(trials, 50))]
        name = f"{where}: equal models refused, as check says before, %"
        yield Figure(name=name, source="predicted", value=100 * statistics.fmean(said))
        for loss in (margin, 1.5 * margin):
            passed = [one_day(population, rows, loss, settings, draw).passes for _ in range(trials)]
            yield share(f"{where}: promoted with a loss of {100 * loss:g}, %", passed)


def _said_power(population: Population, rows: int, settings: GateSettings, draw: np.random.Generator) -> float:
    drawn = Rows(population, rows, draw)
    old = scores("old", "frozen", drawn, drawn.right(ACCURACY, drawn.luck))
    return resolution(old, settings).power(settings.margin, settings.confidence)


def one_day(
    population: Population, rows: int, loss: float, settings: GateSettings, draw: np.random.Generator
) -> GateResult:
    """Judges a version that is this much less accurate than the one before."""
    drawn = Rows(population, rows, draw)
    old = scores("old", "frozen", drawn, drawn.right(ACCURACY, drawn.luck))
    new = scores("new", "frozen", drawn, drawn.right(ACCURACY - loss, drawn.next_luck()))
    return decide(DayScores(scores=(new, old)), CONTEST, settings)


def slices(trials: int, rows: int = 2000, number: int = 8) -> Iterator[Figure]:
    """How often one spoiled slice of eight is seen, and equal models are refused for a slice, under three rules."""
    settings = GateSettings(slices=("site",))
    site = [f"{index % number}" for index in range(rows)]
    for loss in (0.0, 0.06, 0.12):
        draw = np.random.default_rng(int(100 * loss))
        found = []
        for _ in range(trials):
            drawn = Rows(LARGE_CHANGE, rows, draw)
            spoiled = np.where(np.arange(rows) % number == 0, ACCURACY - loss, ACCURACY)
            old = scores("old", "frozen", drawn, drawn.right(ACCURACY, drawn.luck), site=site)
            new = scores("new", "frozen", drawn, drawn.right(spoiled, drawn.next_luck()), site=site)
            result = decide(DayScores(scores=(new, old)), CONTEST, settings)
            found.append([one for one in result.comparisons if one.name.startswith("site=")])
        what = f"one slice of {number} loses {100 * loss:g} points" if loss else f"equal models, {number} slices"
        yield share(f"{what}: refused for a slice, %", [not all(one.passed for one in day) for day in found])
        yield share(
            f"{what}: refused if each had to be shown within 3 margins, %",
            [not all(one.low > one.limit for one in day) for day in found],
        )
        yield share(f"{what}: refused if seen beyond 3 margins, %", [any(map(_is_beyond, day)) for day in found])


def _is_beyond(one: Comparison) -> bool:
    return one.high < one.limit


def losses(runs: int, days: int = 60) -> Iterator[Figure]:
    """A true loss of 0.3 points a day, with an anchor and without."""
    chain = Chain(population=SMALL_CHANGE, rows=2000, days=days, loss=0.003, settings=GateSettings())
    for words, one in (("against yesterday only", chain), ("with the anchor", replace(chain, anchored=True))):
        ends = [run_days(one, seed) for seed in range(runs)]
        where = f"0.3 points lost a day, {days} days, {words}"
        yield column(f"{where}: accuracy on rows not seen, %", [100 * end.accuracy for end in ends])
        yield column(f"{where}: days promoted", [end.promoted for end in ends])


def wear(runs: int, days: int = 60) -> Iterator[Figure]:
    """What frozen rows flatter after many decisions, as they are, and with rows renewed on promoted days."""
    base = Chain(population=SMALL_CHANGE, rows=2000, days=days, loss=0.003, settings=GateSettings())
    for rows in (0, 200, 1000):
        chain = replace(base, settings=replace(base.settings, renew_rows=rows, max_frozen_rows=base.rows))
        ends = [run_days(chain, seed) for seed in range(runs)]
        renewed = f"{rows} renewed a promotion" if rows else "none renewed"
        where = f"{days} decisions on 2000 rows, {renewed}"
        flattered = [100 * (end.frozen - end.accuracy) for end in ends]
        yield column(f"{where}: they flatter by, points", flattered)
        yield column(f"{where}: accuracy on rows not seen, %", [100 * end.accuracy for end in ends])


def poison(trials: int) -> Iterator[Figure]:
    """Days on which half of the labels are wrong, and a day on which the world has really changed."""
    for words, fresh, frozen in (
        ("half of the labels wrong and learned", (0.50, 0.70), 0.80),
        ("half of the labels wrong, hardly learned", (0.50, 0.55), 0.92),
        ("the world changed, the model follows", (0.80, 0.90), 0.94),
    ):
        draw = np.random.default_rng(len(words))
        caught = [check_data(_figures(fresh[0], draw), _usual_days(draw), DataCheckSettings()) for _ in range(trials)]
        yield share(f"{words}: quarantined before training, %", [one.quarantine for one in caught])
        for budget in (0.0, 0.02):
            settings = GateSettings(frozen_budget=budget)
            passed = [_with_fresh(fresh, frozen, settings, draw).passes for _ in range(trials)]
            yield share(f"{words}: refused if trained, frozen_budget {100 * budget:g}, %", [not one for one in passed])


def _with_fresh(
    fresh: tuple[float, float], frozen: float, settings: GateSettings, draw: np.random.Generator
) -> GateResult:
    found = []
    for rows, (before, after) in (("frozen", (ACCURACY, frozen)), ("fresh", fresh)):
        drawn = Rows(SMALL_CHANGE, 2000 if rows == "frozen" else 500, draw)
        found.append(scores("old", rows, drawn, drawn.right(before, drawn.luck)))
        found.append(scores("new", rows, drawn, drawn.right(after, drawn.next_luck())))
    return decide(DayScores(scores=tuple(found)), CONTEST, settings)


def _usual_days(draw: np.random.Generator) -> tuple[DayFigures, ...]:
    return tuple(_figures(ACCURACY, draw) for _ in range(7))


def _figures(accuracy: float, draw: np.random.Generator) -> DayFigures:
    drawn = Rows(SMALL_CHANGE, 500, draw)
    return day_figures("", scores("old", "fresh", drawn, drawn.right(accuracy, drawn.luck)), unreadable={}, inputs={})


def share(name: str, hits: Sequence[bool]) -> Figure:
    """Returns a share in percent with its 95 % interval (Wilson)."""
    number, rate = len(hits), sum(hits) / len(hits)
    spread = 1.96 * math.sqrt(rate * (1 - rate) / number + 1.96**2 / (4 * number**2))
    low, high = ((rate + 1.96**2 / (2 * number) + sign * spread) / (1 + 1.96**2 / number) for sign in (-1, 1))
    return Figure(name=name, source="simulated", value=100 * rate, low=max(0.0, 100 * low), high=100 * high)


def column(name: str, samples: Sequence[float]) -> Figure:
    """Returns a mean over runs with its bootstrapped 95 % interval."""
    low, high = interval(list(samples), statistics.fmean, 0)
    return Figure(name=name, source="simulated", value=statistics.fmean(samples), low=low, high=high)
