"""Megatron-LM: every module on all devices, one after the other (Mosaic section 2.2, Fig. 3a).

Data parallelism on everything there is, which ignores that a small module scales badly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mosaic.solver.planners.draft import DraftWave, Widths, whole_job


def all_on_all(order: Sequence[str], widths: Mapping[str, Widths]) -> list[DraftWave]:
    """Gives every module a wave of its own, at the largest degree that it can have here."""
    return [(whole_job(name, widths[name][-1]),) for name in order]
