"""The goals: what is asked of the planner, which figure answers it, and whether that is reached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench.record import Figure, missing_figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One line of the table."""

    figure: str
    """Regular expression for the whole names of figures; every one of them counts."""
    most: float | None = None
    """What the figure may be at most."""
    least: float | None = None
    """What it must be at least."""
    name: str = ""
    """Name that stands where no such figure was made; empty: the expression without its signs."""

    def is_met(self, value: float) -> bool:
        """Whether a number reaches it."""
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    @property
    def asked(self) -> str:
        """What is asked, in words."""
        return f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}"


TEN = "10 modules, 8 GPUs, 10 %"


def _twenty(num_devices: int) -> Goal:
    name = f"20 modules, {num_devices} GPUs, with a backbone: proven gap within 5 s, median, %"
    return Goal(figure=re.escape(name), most=0.1, name=name)


GOALS = (
    Goal(figure=re.escape(TEN) + r": proven optimal within .* s, share of instances", least=1.0, name=f"{TEN}: proven"),
    Goal(figure=re.escape(f"{TEN}: search time, median, s"), most=0.001, name=f"{TEN}: search time, median, s"),
    Goal(figure=re.escape(f"{TEN}: search time, worst, s"), most=0.5, name=f"{TEN}: search time, worst, s"),
    *(_twenty(num_devices) for num_devices in (8, 32)),
)


def with_missing(figures: Sequence[Figure]) -> list[Figure]:
    """Adds a figure without a number for each goal that no figure answers."""
    missing = [goal for goal in GOALS if not any(re.fullmatch(goal.figure, figure.name) for figure in figures)]
    return [*figures, *(missing_figure(goal.name, "its part of the study made no such figure") for goal in missing)]


def table(figures: Sequence[Figure]) -> list[str]:
    """Returns a line for each figure that has a goal; one without a number never reaches it."""
    lines = []
    for goal in GOALS:
        for figure in figures:
            if not re.fullmatch(goal.figure, figure.name) and figure.name != goal.name:
                continue
            if figure.value is None:
                shown = f"not had: {figure.reason}"
            else:
                shown = f"{figure.value:.4g} ({'reached' if goal.is_met(figure.value) else 'NOT reached'})"
            lines.append(f"{figure.name}: {goal.asked}; {shown}")
    return lines
