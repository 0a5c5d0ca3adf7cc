"""Spindle-Optimus: devices to whichever module gains most from one more, the task-level baseline of the Spindle paper.

As the Spindle paper (arXiv 2409.03365) describes its baseline: start with one device each, repeatedly give the next
valid increment to the largest marginal gain (T(n) - T(n')) / (n' - n). *Ours*: it is done level by level, modules
standing for tasks, and modules that do not fit side by side are spread over waves as for ``distmm``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.distmm import waves_of_level
from mosaic.solver.planners.draft import DraftWave, Sheet, Widths, draw_levels, falling, whole_job


def draw(sheet: Sheet) -> list[DraftWave]:
    """Draws the waves of each level, with devices by marginal gain."""
    share = partial(by_marginal_gain, widths=sheet.widths, num_devices=sheet.num_devices)
    return draw_levels(sheet.graph, lambda level: waves_of_level(level, sheet.widths, sheet.num_devices, share))


def by_marginal_gain(names: Sequence[str], widths: Mapping[str, Widths], num_devices: int) -> DraftWave:
    """Splits the devices among modules whose lowest degrees fit side by side."""
    steps = {name: falling(widths[name]) for name in names}
    at = dict.fromkeys(names, 0)

    def gain(name: str) -> float:
        now, following = _next(steps[name], at[name])
        return (now.latency_ns - following.latency_ns) / (following.degree - now.degree)

    while True:
        free = num_devices - sum(steps[name][at[name]].degree for name in names)
        open_to = [name for name in names if at[name] + 1 < len(steps[name]) and _increment(steps, at, name) <= free]
        if not open_to:
            return tuple(whole_job(name, steps[name][at[name]]) for name in names)
        at[max(open_to, key=gain)] += 1


def _increment(steps: Mapping[str, Widths], at: Mapping[str, int], name: str) -> int:
    now, following = _next(steps[name], at[name])
    return following.degree - now.degree


def _next(steps: Widths, index: int) -> tuple[DeploymentOption, DeploymentOption]:
    return steps[index], steps[index + 1]
