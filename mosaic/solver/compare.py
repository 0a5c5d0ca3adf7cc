"""Compares planning methods on one graph, device and cost model, for ``mosaic plan --compare``.

All times are predicted. A plan that slices modules (Spindle's) may beat the best plan of whole modules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.methods import METHODS, compared_methods
from mosaic.solver.options import all_options
from mosaic.solver.solve import solve
from mosaic.solver.task import SearchOptions

COMPARED_LAYERS = 12
"""Default number of layers per module, for Spindle's slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A method's plan, or the reason for its absence."""

    method: str
    plan: Plan | None = None
    reason: str = ""
    seconds: float
    """Wall time of planning."""


def compare(
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    methods: Sequence[str] | None = None,
    search: SearchOptions | None = None,
) -> tuple[Comparison, ...]:
    """Plans with every method in turn; a method that fails is listed with the reason.

    Args:
        graph, cost, device, num_devices: As for ``solve``, the same for all.
        methods: Names from ``METHODS``, each once; by default those with ``compared``.
        search: Granularity and limits; 1 layer becomes ``COMPARED_LAYERS``.

    Raises:
        InfeasibleError: A module fits on no device.
        ValueError: A method is unknown or named twice, or the cost model gives a negative time.
    """
    methods = compared_methods() if methods is None else methods
    if not methods or set(methods) - set(METHODS) or len(set(methods)) < len(methods):
        raise ValueError(f"methods={tuple(methods)}; pass each name once, at least one of {', '.join(METHODS)}")
    search = search or SearchOptions()
    if search.layers == 1:
        search = replace(search, layers=COMPARED_LAYERS)
    all_options(graph, cost=cost, device=device, num_devices=num_devices, percents=search.percents)  # else all fail
    rows = []
    for method in methods:
        start, plan, reason = time.perf_counter(), None, ""
        try:
            plan = solve(graph, cost, device, num_devices=num_devices, method=method, search=search)
        except (InfeasibleError, UndecidedError, ValueError) as error:
            reason = str(error)
        rows.append(Comparison(method=method, plan=plan, reason=reason, seconds=time.perf_counter() - start))
    return tuple(rows)
