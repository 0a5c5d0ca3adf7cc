"""All ways go through all phases, in turn, so that a drift of the machine hits all of them."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.changing.ways import WAYS, Batch, Plain
from bench.changing.workload import Scale, modalities_of
from bench.record import Figure, median_figure
from mosaic.errors import MosaicError

PARTS = ("find", "profile", "solve", "open", "save", "make", "load")
"""Of a change, in the order of the pages."""
_SAME = 1e-2
"""By how much the ways' losses may differ: lanes have other numbers of threads."""


@dataclass(slots=True)
class Passed:
    """What one way went through."""

    rounds: list[list[list[float]]] = field(default_factory=list)
    """Milliseconds of the steps of each round of each phase."""
    changes: list[Mapping[str, float]] = field(default_factory=list)
    """Milliseconds of the parts of each change; first of all, of getting ready."""

    trials_ms: list[float] = field(default_factory=list)
    """What trials lost in each phase, in milliseconds: a part of its steps."""

    def steps_ms(self, number: int) -> list[float]:
        """Returns the times of a phase's steps."""
        return [ms for times in self.rounds[number] for ms in times]

    @property
    def whole_ms(self) -> float:
        """All steps and changes; getting ready is left out."""
        steps = math.fsum(ms for number in range(len(self.rounds)) for ms in self.steps_ms(number))
        return steps + math.fsum(change.get("in all", 0.0) for change in self.changes[1:])


def go_through(scale: Scale) -> dict[str, Passed]:
    """Lets all ways train through all phases; returns what each went through, by its name.

    Raises:
        MosaicError: A way trained another model than the plain loop.
    """
    batches = scale.batches()
    ways = [way(scale, batches[0]) for way in WAYS]
    passed = {way.name: Passed(changes=[dict(way.parts)]) for way in ways}
    try:
        for number, batch in enumerate(batches):
            for way in ways if number else ():
                way.change(batch)
                passed[way.name].changes.append(dict(way.parts))
            for way in ways:
                passed[way.name].rounds.append([])
            for turn in range(scale.rounds):
                for way in ways if turn % 2 else reversed(ways):
                    passed[way.name].rounds[-1].append([way.step_ms(batch) for _ in range(scale.steps)])
            for way in ways:
                passed[way.name].trials_ms.append(way.trial_lost_ms)
            _check_alike(ways, number, batch)
    finally:
        for way in ways:
            way.close()
    return passed


def _check_alike(ways: Sequence[Plain], number: int, batch: Batch) -> None:
    plain = ways[0].loss
    for way in ways:
        if not math.isclose(way.loss, plain, rel_tol=_SAME):
            raise MosaicError(
                f"in phase {number} of {len(batch)} tasks {way.name} has a loss of {way.loss} and the plain loop one "
                f"of {plain}; they have to be equal but for rounding"
            )


def figures_of(phases: Sequence[Sequence[str]], passed: Mapping[str, Passed]) -> list[Figure]:
    """Returns the figures of a run."""
    plain, *others = (way.name for way in WAYS)
    figures = []
    count = sum(len(passed[plain].steps_ms(number)) for number in range(len(phases)))
    for name in others:
        ratio = passed[name].whole_ms / passed[plain].whole_ms
        whole = f"{name}: all {count} steps and changes over the plain loop's, ratio"
        figures.append(Figure(name=whole, source="measured", value=ratio))
    for number, tasks in enumerate(phases):
        of = f"phase {number} ({', '.join(modalities_of(tasks))})"
        figures.append(median_figure(f"{of}: plain step, ms", passed[plain].steps_ms(number)))
        for name in others:
            ratios = [
                statistics.median(ours) / statistics.median(theirs)
                for ours, theirs in zip(passed[name].rounds[number], passed[plain].rounds[number], strict=True)
            ]
            figures.append(median_figure(f"{of}: step with {name} over the plain step, ratio", ratios))
    for name in others:
        changes = passed[name].changes
        ready_ms = math.fsum(changes[0].values())
        figures.append(Figure(name=f"{name}: getting ready, ms", source="measured", value=ready_ms))
        figures.append(median_figure(f"{name}: lost by the trials of a phase, ms", passed[name].trials_ms))
        for part in ("in all", *PARTS):
            times = [change[part] for change in changes[1:] if part in change]
            if times:
                figures.append(median_figure(f"{name}: lost at a change, {part}, ms", times))
        for number, change in enumerate(changes[1:], start=1):
            if change:
                step_ms = statistics.median(passed[plain].steps_ms(number))
                lost = change["in all"] / step_ms
                figures.append(
                    Figure(name=f"{name}: lost at change {number}, in plain steps", source="measured", value=lost)
                )
    return figures


def process_figure() -> Figure:
    """Returns what a process takes until it can make a model: what a new start in a new process adds to its changes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import mosaic.engine, mosaic.models, mosaic.ranks"], check=True)
    took_ms = (time.perf_counter() - began) * 1e3
    return Figure(name="a new process: imports, ms", source="measured", value=took_ms)
