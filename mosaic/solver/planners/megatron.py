"""Megatron-LM: every module in turn, all at one data-parallel degree (Mosaic section 2.2, Fig. 3a).

Any degree that the cost model offers may be the one, not only all devices: the best is taken, as a person does who
tunes it. A module that cannot have that degree has the next lower one. ``spindle-seq`` is Spindle's own baseline
(appendix H), which runs the tasks one after the other on all devices, as Spindle's authors have Megatron-LM do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.draft import DraftWave, Sheet, Widths, in_task_order, whole_job


def draw(sheet: Sheet) -> Iterator[Sequence[DraftWave]]:
    """Draws a draft for each degree, the fastest first."""
    degrees = sorted({option.degree for widths in sheet.widths.values() for option in widths}, reverse=True)
    yield from sorted((_at(sheet, degree) for degree in degrees), key=_total_ns)


def draw_on_all(sheet: Sheet) -> Iterator[Sequence[DraftWave]]:
    """Draws ``spindle-seq``: every module at the largest degree that it can have here."""
    yield _at(sheet, sheet.num_devices)


def _at(sheet: Sheet, degree: int) -> Sequence[DraftWave]:
    return [(whole_job(name, _nearest(sheet.widths[name], degree)),) for name in in_task_order(sheet)]


def _nearest(widths: Widths, degree: int) -> DeploymentOption:
    return max((option for option in widths if option.degree <= degree), key=lambda o: o.degree, default=widths[0])


def _total_ns(waves: Sequence[DraftWave]) -> int:
    return sum(option.latency_ns for wave in waves for job in wave for option in job.options)
