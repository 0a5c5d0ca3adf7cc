"""The paper's Fig. 13 and 14 again, with what its text says beside ours; nothing is read off its plots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from bench.figures.papers.read import printed
from bench.record import Figure
from bench.solver.gains import model, ratios
from bench.solver.generate import ofasys
from bench.solver.runs import figure, limits_of, search
from mosaic.solver import QuotaGrid, SearchOptions, solve
from mosaic.solver.instance import Instance, TableCost
from mosaic.solver.limits import SearchLimits

ABLATIONS = MappingProxyType(
    {
        "GAHC": SearchOptions(prune=False, cache=False),
        "GAHC + caching": SearchOptions(prune=False),
        "Mosaic mapping-solver": SearchOptions(),
    }
)
ALGORITHM_1 = "Mosaic mapping-solver"
"""The paper's name for Algorithm 1 with both savings."""
PERCENTS = (30, 20, 10, 5, 1)
"""Steps of quotas."""
RIVALS = ("megatron", "spindle", "distmm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A plan's time and what it took to find."""

    step_ms: float
    """Predicted."""
    seconds: float
    """Wall time."""


def _solve(instance: Instance, method: str, options: SearchOptions) -> Solved:
    began = time.perf_counter()
    plan = solve(
        instance.graph,
        TableCost(instance),
        instance.device,
        num_devices=instance.num_devices,
        method=method,
        search=replace(options, limits=limits_of(method, options.limits.effort)),
    )
    return Solved(step_ms=plan.predicted_ms, seconds=time.perf_counter() - began)


def figure_13(*, sizes: Sequence[int], seeds: int, ablated: int, seconds: float) -> Iterator[Figure]:
    """Search time of Algorithm 1 with and without its savings, and of exact search; optimality.

    Args:
        sizes: Modules of OFASys; the paper goes to 20 for times, and to 10 for optimality.
        seeds: Instances of each size; the paper speaks of medians, and says not of how many.
        ablated: Of these, the ones that Algorithm 1 also plans without its savings, which takes long.
        seconds: What an exact search may take.
    """
    for method in ("gahc", "exact"):  # what they load is loaded before a clock runs
        _solve(ofasys(3, num_devices=8, disturbed=False), method, SearchOptions())
    for size in sizes:
        instances = [ofasys(size, num_devices=8, disturbed=False, seed=seed) for seed in range(seeds)]
        exact = [search(instance, seconds=seconds) for instance in instances]
        found: dict[str, list[Solved]] = {}
        for name, options in ABLATIONS.items():
            among = instances if name == ALGORITHM_1 else instances[:ablated]
            found[name] = [_solve(instance, "gahc", options) for instance in among]
            times = [one.seconds for one in found[name]]
            yield figure(f"Fig. 13a: {name}, {size} modules, median, s", times, "measured")
        yield figure(f"Fig. 13a: exact, {size} modules, median, s", [one.seconds for one in exact], "measured")
        pairs = [(best, one) for best, one in zip(exact, found[ALGORITHM_1], strict=True) if best.is_proven]
        yield figure(
            f"Fig. 13b: optimality of the Mosaic mapping-solver, {size} modules, median, %",
            [100 * best.cost_ms / one.step_ms for best, one in pairs],
            "simulated",
            paper=printed("mosaic", "Fig. 13b").get(str(size), ""),
            reason="" if pairs else f"no optimum was proven within {seconds:g} s",
        )


def figure_14a(*, seeds: int, seconds: float) -> list[Figure]:
    """Throughput of OFASys with four modules against the others, as GPUs are added."""
    figures, said = [], printed("mosaic", "Fig. 14a")
    for num_devices in (8, 16, 32):
        found = [
            ratios(
                model("OFASys", num_devices=num_devices, seed=seed),
                seconds=seconds,
                methods=RIVALS,
            )
            for seed in range(seeds)
        ]
        figures += [
            figure(
                f"Fig. 14a: throughput over {rival}, OFASys, {num_devices} GPUs, median",
                [one[rival] for one in found],
                "simulated",
                paper=said[f"{rival}, {num_devices}"],
            )
            for rival in RIVALS
        ]
    return figures


def figure_14b(*, num_modules: int, seeds: int, seconds: float) -> Iterator[Figure]:
    """Search time and quality as the steps of quotas become finer; against the best plan known in steps of 1 %."""
    found: dict[tuple[int, str], list[Solved]] = {(p, m): [] for p in PERCENTS for m in ("exact", "gahc")}
    for seed in range(seeds):
        instance = ofasys(num_modules, num_devices=8, num_slots=100, disturbed=False, seed=seed)
        for (percent, method), solved in found.items():
            grid = QuotaGrid(percents=tuple(range(percent, 101, percent)))
            options = SearchOptions(grid=grid, limits=SearchLimits(effort=seconds), use_spare_slots=False)
            solved.append(_solve(instance, method, options))
    said = printed("mosaic", "Fig. 14b")
    best_ms = [min(solved[seed].step_ms for solved in found.values()) for seed in range(seeds)]
    for (percent, method), solved in found.items():
        asked = ("search time", "best over plan")
        time_said, best_said = (said[f"{what}, {percent}"] if method == "gahc" else "" for what in asked)
        of = f"Fig. 14b: {method}, OFASys {num_modules} modules, steps of {percent} %"
        ratios = [100 * best / one.step_ms for best, one in zip(best_ms, solved, strict=True)]
        yield figure(f"{of}: search time, median, s", [one.seconds for one in solved], "measured", paper=time_said)
        yield figure(f"{of}: best known over plan, median, %", ratios, "simulated", paper=best_said)
