"""Figures of ``bench.cost``: how they are called, what is hoped for, and means with their raw samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from bench.record import Figure, missing_figure

COUNTS = tuple(range(2, 9))
"""Modules side by side, as in paper Fig. 12."""

ALL = "all"
"""Stands for a model of all modules of the study where they do not fit on the device at once."""

FORM_WORDS: Mapping[str, str] = MappingProxyType(
    {"none": "interference-unaware", "additive": "additive", "full": "full", "ours": "ours"}
)
"""Forms of interference that are compared, and what figures call them."""

PAPER_ERRORS: Mapping[str, float] = MappingProxyType({"none": 0.1785, "additive": 0.1139, "full": 0.0365})
"""Paper section 5.3.2: mean prediction error at 8 modules."""

TRIED = "tried"
"""Label of a figure that has no number because everything that was tried fell short."""

RULES = ("in proportion", "max-min", "mixed", "queueing")
"""How the simulator shares bandwidth."""

SLOTS = (16, 66)
"""Slots of the simulated device: 8 SMs each, and 2."""

SHARE_OF_GRID = "samples of adaptive sampling over those of the paper's grid"


def error_name(count: int, form: str, *, rule: str = "") -> str:
    """Names the error at held-out plans; ``rule`` says that it is simulated."""
    head = f"simulated ({rule}): " if rule else ""
    return f"{head}prediction error of held-out plans, {count} modules, {FORM_WORDS[form]}"


def step_name(count: int | str, form: str, *, rule: str = "") -> str:
    """Names what a form's plan takes, as a multiple of what the unaware plan takes; ``count`` may be ``ALL``."""
    head = f"simulated ({rule}): " if rule else ""
    return f"{head}step of the plan over the unaware one's, {count} modules, {FORM_WORDS[form]}"


_HEADS = ("", *(f"simulated ({num} slots): " for num in SLOTS))
GOALS: Mapping[str, tuple[float, str]] = MappingProxyType(
    {error_name(count, "ours", rule=rule): (0.02, "at most 2 %") for rule in ("", *RULES) for count in COUNTS}
    | {head + SHARE_OF_GRID: (1 / 3, "a third of the paper's grid, at its accuracy") for head in _HEADS}
)
"""By figure: the most that it may be, and the same in words."""


def mean_figure(
    name: str, samples: Sequence[float], *, source: str, labels: dict[str, str] | None = None, reason: str = ""
) -> Figure:
    """Returns the mean of samples (the paper's *average* error), all of them, and a bootstrapped 95 % interval."""
    if not samples:
        return replace(missing_figure(name, reason or "nothing was measured", labels), source=source)
    dice = np.random.default_rng(0)
    means = np.sort([dice.choice(samples, len(samples)).mean() for _ in range(500)])  # as ``record.interval``, faster
    return Figure(
        name=name,
        source=source,
        value=statistics.fmean(samples),
        low=float(means[12]),
        high=float(means[-13]),
        samples=tuple(float(f"{sample:.6g}") for sample in samples),
        labels=labels or {},
    )


def absent(names: Iterable[str], reason: object, *, source: str = "measured") -> list[Figure]:
    """Returns figures that cannot be had."""
    return [replace(missing_figure(name, reason), source=source) for name in names]


def verdict(figure: Figure) -> str:
    """Says whether a goal is met: ``met``, ``not met``, ``not measured`` (which is neither), or nothing without one."""
    if figure.name not in GOALS:
        return ""
    if figure.value is None:
        return "not met" if figure.labels.get(TRIED) else "not measured"
    return "met" if figure.value <= GOALS[figure.name][0] else "not met"


def judged(figure: Figure) -> Figure:
    """Returns a figure with its number of samples, and its goal, verdict and the paper's number, if any, as labels."""
    labels = {"num_samples": str(len(figure.samples)), **figure.labels}
    if figure.name in GOALS:
        labels |= {"goal": GOALS[figure.name][1], "verdict": verdict(figure)}
    for form, error in PAPER_ERRORS.items():
        if figure.name == error_name(8, form):
            labels["paper"] = str(error)
    return replace(figure, labels=labels)
