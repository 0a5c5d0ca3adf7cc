"""Many GPUs, simulated from counted operators: every planner's plan of one model under one cost model, links included.

A step is simulated event by event (``mosaic.simulate.step``): no barrier ends a stage, and a module starts when its
inputs are there and its slots are free. Its time has the rows that travel to its ranks and back (``RankedCost``);
gradients are summed meanwhile on a network that all modules of a device share (``mosaic.simulate.step``). Planners
know nothing of that sharing; ``auto`` chooses its plan by this very step (``mosaic.solver.shared_network``), so that no
planner of whole modules should have a shorter one. Spindle's slices, which cannot be run, may. Papers' numbers stand in
a label of their own; they are of other hardware and details.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.figures.papers.read import printed
from bench.ranks.layer_tables import ModelTable, load_table
from bench.record import Figure, missing_figure
from mosaic.cost.communication import RankedCost
from mosaic.cost.interference import Interference, Neighbours, NoInterference
from mosaic.errors import MosaicError
from mosaic.hardware import find_cluster
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.simulate.step import simulate
from mosaic.solver import SearchOptions
from mosaic.solver.compare import COMPARED_PLANNERS
from mosaic.solver.limits import SearchLimits
from mosaic.solver.methods import compared_methods
from mosaic.solver.options import MAX_MS
from mosaic.solver.runnable import plan_to_run

METHODS = ("auto", *compared_methods())
"""The first is what people get where they name no method."""
FIGURE_14A = printed("mosaic", "Fig. 14a")
"""Mosaic's throughput over others' with four modules of OFASys, by planner and number of GPUs."""
FIGURE_9 = printed("mosaic", "Fig. 9")
"""The same over the six models, by planner."""
TABLE_2 = printed("spindle", "Table 2")
"""Speed-ups over DeepSpeed on 256 GPUs, there simulated, too, by planner and size of QWen-VAL."""


class ModelCost:
    """The cost model of a counted model."""

    def __init__(self, table: ModelTable) -> None:
        self.profile_fingerprint: str | None = None
        self.interference: Interference = NoInterference()
        self._degrees = {degree: place for place, degree in enumerate(table.degrees)}
        self._modules = {module.module: module for module in table.modules}

    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the table's degrees, but for those at which a slot takes longer than planners accept."""
        own = self._modules[module]
        slowest = zip(self._degrees, own.forward_ms, own.backward_ms, strict=True)
        return tuple(degree for degree, forward, backward in slowest if max(*forward, *backward) <= MAX_MS)

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        """Returns every number of slots."""
        return tuple(range(1, len(self._modules[module].forward_ms[0]) + 1))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the table's time, in milliseconds."""
        own = self._modules[module]
        times = own.forward_ms if phase is Phase.FORWARD else own.backward_ms
        return times[self._degrees[degree]][quota - 1]

    def memory_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes on each device."""
        return self._modules[module].memory_bytes[self._degrees[degree]]

    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns those that stay."""
        return self._modules[module].kept_bytes[self._degrees[degree]]

    def interference_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Neighbours) -> float:
        """Returns 0."""
        return 0.0

    def placed_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Neighbours = ()) -> float:
        """Returns the time alone."""
        return self.time_ms(module, phase, degree, quota)


def simulated_steps(
    name: str, num_devices: int, *, seconds: float, methods: Sequence[str] = METHODS, with_memory: bool = True
) -> dict[str, tuple[Plan, float] | str]:
    """Returns each method's plan with its simulated step in milliseconds, or why there is none.

    Args:
        name: A counted model.
        num_devices: GPUs.
        seconds: When an exact search ends.
        methods: Who plans.
        with_memory: Whether plans have to fit; a model that is too large for any one device fits into none.
    """
    from dataclasses import replace

    table = load_table(name)
    cluster = find_cluster(table.device, num_devices)
    traffic = {module.module: module.traffic for module in table.modules}
    cost = RankedCost(ModelCost(table), traffic, cluster, num_devices)
    device = cluster.hardware.device()
    if not with_memory:
        device = replace(device, memory_bytes=0)
    search = SearchOptions(limits=SearchLimits(effort=seconds), hold_memory=False, planners=COMPARED_PLANNERS)
    found: dict[str, tuple[Plan, float] | str] = {}
    for method in methods:
        try:
            plan = plan_to_run(method, table.graph, cost, device, num_devices=num_devices, search=search)
            step = simulate(plan, table.graph, sums=cost.summed)
            found[method] = plan, step.makespan_ms
        except (MosaicError, ValueError) as error:
            found[method] = str(error)
    return found


def scaling(
    *,
    name: str,
    num_devices: Sequence[int],
    seconds: float,
    paper: str,
    methods: Sequence[str] = METHODS,
    with_memory: bool = True,
) -> Iterator[Figure]:
    """A model on 8, 16, 32 GPUs: simulated steps, and others' over ``auto``'s.

    Args:
        name: A counted model.
        num_devices: Numbers of GPUs.
        seconds: When an exact search ends.
        paper: ``14a`` or ``9``: whose numbers stand beside.
        methods: Who plans; others are figures without a number.
        with_memory: Whether plans have to fit into memory; if not, names say so.
    """
    for count in num_devices:
        of = f"{name}, {count} GPUs" + ("" if with_memory else " of any memory")
        steps = simulated_steps(name, count, seconds=seconds, methods=methods, with_memory=with_memory)
        steps |= {method: "left out: takes too long here" for method in METHODS if method not in methods}
        yield from _figures(steps, of, {m: _paper(paper, m, count) for m in steps}, over="auto", faster=False)


def large_cluster(*, name: str, num_devices: int, seconds: float) -> Iterator[Figure]:
    """Spindle's Table 2: speed-ups over every module on all GPUs in turn."""
    of = f"{name}, {num_devices} GPUs"
    steps = simulated_steps(name, num_devices, seconds=seconds, with_memory=False)
    papers = {method: TABLE_2.get(f"{method}, {name.removeprefix('qwen-val-')}", "") for method in steps}
    yield from _figures(steps, of, papers, over="megatron", faster=True)


def _paper(paper: str, method: str, count: int) -> str:
    return FIGURE_14A.get(f"{method}, {count}", "") if paper == "14a" else FIGURE_9.get(method, "")


def _figures(
    steps: Mapping[str, tuple[Plan, float] | str], of: str, papers: Mapping[str, str], *, over: str, faster: bool
) -> Iterator[Figure]:
    base = steps.get(over)
    for method, found in steps.items():
        ratio = f"{method}: speed-up over {over}, {of}" if faster else f"{method}: step over {over}'s, {of}, ratio"
        names = (f"{method}: step, {of}, ms", ratio)
        if isinstance(found, str) or base is None or isinstance(base, str):
            reason = found if isinstance(found, str) else f"no {over} plan to compare with"
            yield from (missing_figure(name, reason, source="simulated") for name in names)
            continue
        plan, step_ms = found
        labels = {
            "samples": "1",
            "stages": str(len(plan.stages)),
            "communication_ms": f"{plan.communication_ms:.4g}",
            "status": plan.search.status,
        }
        yield Figure(name=names[0], source="simulated", value=step_ms, samples=(step_ms,), labels=labels)
        value = base[1] / step_ms if faster else step_ms / base[1]
        beside = {"samples": "1"} | ({"paper": papers[method]} if papers.get(method) else {})
        yield Figure(name=ratio, source="simulated", value=value, samples=(value,), labels=beside)
