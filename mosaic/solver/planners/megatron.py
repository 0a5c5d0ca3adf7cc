"""Megatron-LM: every module on all devices, one after the other (Mosaic section 2.2, Fig. 3a).

Data parallelism on everything there is, which ignores that a small module scales badly.
"""

from __future__ import annotations

from mosaic.solver.planners.draft import DraftWave, Sheet, whole_job


def draw(sheet: Sheet) -> list[DraftWave]:
    """Gives every module a wave of its own, at the largest degree that it can have here."""
    return [(whole_job(name, sheet.widths[name][-1]),) for name in sheet.graph.topological_order()]
