"""The questions of ``mosaic bench`` as measurements: their results become figures, whatever their fields are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from bench.gpu.bench import Bench
from bench.record import Figure, median_figure, missing_figure
from mosaic.microbench import QUESTIONS
from mosaic.microbench.overlap import Overlap
from mosaic.microbench.result import NotMeasured, Result, Spread


def measure_question(bench: Bench, *, name: str, grid: int = 8) -> Iterator[Figure]:
    """Measures a question, with at most ``grid`` quotas."""
    if name not in QUESTIONS:
        yield missing_figure(name, f"this version has no question {name!r}; it has {', '.join(QUESTIONS)}")
        return
    result = QUESTIONS[name].measure(bench.backend, bench.settings(grid=grid), bench.budget)
    bench.notes += result.origin.notes
    yield from figures_of(result)


def measure_overlap(bench: Bench, *, grid: int = 8) -> Iterator[Figure]:
    """Measures ``overlap`` and yields each of its rows when it is there, so that no later error can take it away."""
    overlap = Overlap(bench.backend, bench.settings(grid=grid), bench.budget)
    for row in overlap.rows():
        yield from _absent(row) if isinstance(row, NotMeasured) else _figures_of_row(row, {"of": "times"})
    result = overlap.result()
    bench.notes += result.origin.notes
    for gain in result.gains:
        yield from _figures_of_row(gain, {"of": "gains"})


def figures_of(result: Result) -> Iterator[Figure]:
    """Yields a figure for every number of a result.

    Spreads and fractions become figures; words, counts and quotas that stand beside them say what they are of.
    What is absent becomes a figure without a number.
    """
    for fields in dataclasses.fields(result):
        if fields.name in ("schema_version", "origin", "left_out", "absent"):
            continue
        value = getattr(result, fields.name)
        for row in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(row) and not isinstance(row, type):
                yield from _figures_of_row(row, {"of": fields.name})
    for absent in result.absent:
        yield from _absent(absent)


def _absent(absent: NotMeasured) -> Iterator[Figure]:
    yield missing_figure("absent", absent.reason, {"what": absent.what})


def _figures_of_row(row: Any, labels: dict[str, str]) -> Iterator[Figure]:
    fields = [(field.name, getattr(row, field.name)) for field in dataclasses.fields(row)]
    labels = labels | {
        name: _text(value)
        for name, value in fields
        if name != "note" and not _is_number(name, value) and _is_label(value)
    }
    for name, value in fields:
        if isinstance(value, Spread):
            yield median_figure(name, value.samples, labels=labels)
        elif _is_number(name, value):
            yield Figure(name=name, source="measured", value=float(value), labels=labels)
        elif isinstance(value, tuple):
            for inner in value:
                if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
                    yield from _figures_of_row(inner, labels)
    if not any(isinstance(value, Spread | float) for _, value in fields):
        # A row of counts only, such as the SMs of a partition.
        for name, value in fields:
            if isinstance(value, int):
                yield Figure(name=name, source="measured", value=float(value), labels=labels)
            elif isinstance(value, tuple) and all(isinstance(inner, int) for inner in value):
                yield Figure(name=f"num_{name}", source="measured", value=float(len(value)), labels=labels)


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and name.endswith("_bytes"))


def _is_label(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(inner, str | int) for inner in value)
    return isinstance(value, str | int) and value != ""


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
