"""Counting the operators of a user's model, which then needs neither memory for its weights nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from mosaic.cli.workload import load_workload
from mosaic.cost.analytic import count_degrees
from mosaic.engine import find_modules
from mosaic.graph import ModuleGraph
from mosaic.microbench.devices import moved


def count_workload(
    model: str, degrees: Sequence[int], *, kind: Literal["cuda", "host"]
) -> tuple[ModuleGraph, dict[str, Any]]:
    """Returns the modules of ``FILE:FACTORY`` and what each does at each degree, as counted on the meta device.

    Args:
        model: The factory; its model and sample are moved to the meta device, where only shapes are left. A model of
            the zoo is made there.
        degrees: Data-parallel degrees; the batch is divided by each.
        kind: Which kind of device the work is for.
    """
    meta = torch.device("meta")
    workload = load_workload(model, device=meta)
    finding = find_modules(workload.model.to(meta), moved(workload.sample, meta))
    counts = {
        subject.name: count_degrees(
            subject.module, subject.args, subject.kwargs, degrees=tuple(degrees), target=kind, settings=subject.settings
        )
        for subject in finding.subjects
    }
    return finding.graph, counts
