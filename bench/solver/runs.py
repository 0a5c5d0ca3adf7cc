"""One search of one instance, checked; and figures from many of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from bench.record import Figure, Source, interval
from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.solver import SearchOptions
from mosaic.solver.compare import compare
from mosaic.solver.exact import SearchLimits, search_exactly
from mosaic.solver.instance import Instance, TableCost
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine

T = TypeVar("T")
Q = TypeVar("Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What the exact search made of one instance."""

    instance: str
    """Its name."""
    cost_ms: float
    """What the plan takes."""
    bound_ms: float
    """What no plan can be below."""
    is_proven: bool
    """Whether they are the same."""
    seconds: float
    """Wall time from options to stages."""

    @property
    def gap(self) -> float:
        """How far the plan may be above the best one, as a share of the bound."""
        return self.cost_ms / self.bound_ms - 1 if self.bound_ms > 0 else float("inf")


def search(instance: Instance, *, seconds: float) -> Searched:
    """Runs the exact search; its options are listed before the clock starts."""
    cost = TableCost(instance)
    options = all_options(instance.graph, cost=cost, device=instance.device, num_devices=instance.num_devices)
    machine = Machine(
        num_devices=instance.num_devices, num_slots=instance.num_slots, memory_bytes=instance.memory_bytes
    )
    limits = SearchLimits(effort=seconds)
    began = time.perf_counter()
    found = search_exactly(instance.graph, options, cost=cost, machine=machine, limits=limits)
    took = time.perf_counter() - began
    return Searched(
        instance=instance.name,
        cost_ms=found.cost_ms,
        bound_ms=found.record.bound_ms,
        is_proven=found.record.status == "optimal",
        seconds=took,
    )


def limits_of(method: str, seconds: float) -> SearchLimits:
    """Returns what ends a method's search; Algorithm 1's an hour, since its paper ends it by no clock."""
    return SearchLimits(effort=3600.0 if method == "gahc" else seconds)


def predicted_steps(
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int,
    methods: Sequence[str],
    seconds: float,
    hold_memory: bool = True,
) -> dict[str, float]:
    """Returns what the plan of each method is predicted to take, in milliseconds; without those that have none.

    Raises:
        InfeasibleError: A module fits on no device, whoever plans.
    """
    found = [
        row
        for method in methods
        for row in compare(
            graph,
            cost,
            device,
            num_devices=num_devices,
            methods=[method],
            search=SearchOptions(limits=limits_of(method, seconds), hold_memory=hold_memory),
        )
    ]
    return {row.method: row.predicted_ms for row in found if row.predicted_ms is not None}


def two_at_a_time(work: Callable[[Q], T], over: Sequence[Q]) -> list[T]:
    """Runs searches on two cores; the extension lets go of Python's lock."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, over))


def figure(
    name: str,
    samples: Sequence[float],
    source: Source,
    *,
    statistic: Callable[[list[float]], float] = statistics.median,
    paper: str = "",
    reason: str = "",
) -> Figure:
    """Returns a statistic of samples with its bootstrapped 95 % interval and the number of samples.

    Args:
        name: What it is, with its unit.
        samples: Raw samples; none: a figure without a number.
        source: Where they come from.
        statistic: The median by default.
        paper: What the paper has in its place.
        reason: Why there is no number.
    """
    labels = {"samples": str(len(samples))} | ({"paper": paper} if paper else {})
    if len(samples) > 1:
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        labels |= {"p10": f"{tenths[0]:.4g}", "p90": f"{tenths[-1]:.4g}"}
    if not samples or reason:
        why = reason or "no instance of it could be had"
        return Figure(name=name, source=source, value=None, samples=tuple(samples), reason=why, labels=labels)
    low, high = interval(list(samples), statistic, 0)
    return Figure(
        name=name,
        source=source,
        value=statistic(list(samples)),
        low=low,
        high=high,
        samples=tuple(samples),
        labels=labels,
    )
