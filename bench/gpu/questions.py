"""The questions of ``mosaic bench`` as measurements: every number of their rows becomes a figure."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.bench import Bench
from bench.record import Figure, median_figure, missing_figure
from mosaic.microbench import QUESTIONS, Setup
from mosaic.microbench.result import Item, Measurement, NotMeasured
from mosaic.microbench.settings import Spread


def measure_question(bench: Bench, *, name: str, grid: int = 8) -> Iterator[Figure]:
    """Measures a question, with at most ``grid`` quotas; yields each row at once, so that no later error loses it."""
    if name not in QUESTIONS:
        yield missing_figure(name, f"this version has no question {name!r}; it has {', '.join(QUESTIONS)}")
        return
    setup = Setup(backend=bench.backend, settings=bench.settings(grid=grid), budget=bench.budget)
    measurement = Measurement(QUESTIONS[name], setup)
    for item in measurement.items():
        yield from figures_of(item)
    bench.notes += measurement.result().notes


def figures_of(item: Item) -> Iterator[Figure]:
    """Yields a figure for every number of a row; one without a number for an absent measurement."""
    if isinstance(item, NotMeasured):
        yield missing_figure("absent", item.reason, {"what": item.what})
        return
    labels = {"of": item.of} | {name: str(label) for name, label in item.labels.items()}
    for name, value in item.values.items():
        if isinstance(value, Spread):
            yield median_figure(name, value.samples, labels=labels)
        elif value is not None:
            yield Figure(name=name, source="measured", value=float(value), labels=labels)
