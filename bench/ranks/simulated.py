"""Every planner's plan and simulated step on many described GPUs, with one cost model.

No barrier ends a stage: a module starts when its inputs are ready and its slots are free. Rows are sent to its ranks
and back (``RankedCost``), and gradients are reduced meanwhile on a network that all modules of a device share. Only
``auto`` models this sharing: it chooses its plan by this simulated step (``mosaic.solver.runnable``). Spindle's slices,
which cannot run, may be faster. Labels have the papers' numbers, for other hardware and details.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bench.papers.printed import printed
from bench.record import Figure, missing_figure
from mosaic.cli.counting import count_workload
from mosaic.cost.analytic_cost import AnalyticCost
from mosaic.cost.communication import RankedCost
from mosaic.cost.degrees import degrees_to_measure
from mosaic.cost.interference import NoInterference
from mosaic.errors import MosaicError
from mosaic.hardware import find_cluster
from mosaic.simulate.step import simulate
from mosaic.solver import SearchOptions
from mosaic.solver.compare import COMPARED_LAYERS
from mosaic.solver.limits import SearchLimits
from mosaic.solver.runnable import plan_to_run

METHODS = ("auto", "megatron", "distmm", "spindle", "exact")
DEVICE = "h100-80g"


def simulated_steps(
    model: str, num_devices: Sequence[int], *, batch: int, seconds: float, with_memory: bool, least_degree: int = 1
) -> Iterator[tuple[int, dict[str, float | str]]]:
    """Yields each number of GPUs with every method's simulated step in milliseconds, or the reason for none.

    ``model`` is a name and a size of the zoo, such as ``clip-paper``. ``with_memory`` says whether plans have to fit: a
    model that is too large for any one device fits into none. No module runs on fewer GPUs than ``least_degree``.
    """
    counted = count_workload(
        f"zoo:{model}:{batch}", degrees_to_measure(max(num_devices)), kind="cuda", dtype="bfloat16"
    )
    counts = {
        name: {degree: own for degree, own in by_degree.items() if degree >= least_degree}
        for name, by_degree in counted.counts.items()
    }
    search = SearchOptions(limits=SearchLimits(effort=seconds), hold_memory=False, layers=COMPARED_LAYERS)
    for count in num_devices:
        cluster = find_cluster(DEVICE, count)
        base = AnalyticCost(counts, cluster, interference=NoInterference())
        cost = RankedCost(base, counted.traffic, cluster, count, included_ms=base.communication_ms)
        device = cluster.hardware.device()
        if not with_memory:
            device = replace(device, memory_bytes=0)
        steps: dict[str, float | str] = {}
        for method in METHODS:
            try:
                plan = plan_to_run(method, counted.graph, cost, device, num_devices=count, search=search)
                steps[method] = simulate(plan, counted.graph, sums=cost.summed).makespan_ms
            except (MosaicError, ValueError) as error:  # too many modules for the exact search, among others
                steps[method] = str(error)
        yield count, steps


def scaling(
    *, model: str, num_devices: Sequence[int], seconds: float, figure: str, with_memory: bool = True
) -> Iterator[Figure]:
    """The Mosaic paper's Fig. 9 and 14a: other planners' steps over ``auto``'s, as GPUs are added."""
    paper = printed("mosaic", figure)
    name = model.removesuffix("-paper")
    for count, steps in simulated_steps(model, num_devices, batch=32, seconds=seconds, with_memory=with_memory):
        of = f"{name}, {count} GPUs" + ("" if with_memory else " of any memory")
        papers = {method: paper.get(f"{method}, {count}" if figure == "Fig. 14a" else method, "") for method in steps}
        yield from _figures(steps, of, papers, over="auto")


def large_cluster(*, size: str, seconds: float) -> Iterator[Figure]:
    """Spindle's Table 2: speed-ups of QWen-VAL on 256 GPUs over every module on all GPUs in turn."""
    paper = printed("spindle", "Table 2")
    model = f"qwen-val-{size}"
    for count, steps in simulated_steps(model, (256,), batch=256, seconds=seconds, with_memory=False, least_degree=8):
        papers = {method: paper.get(f"{method}, {size}", "") for method in steps}
        yield from _figures(steps, f"{model}, {count} GPUs", papers, over="megatron")


def _figures(steps: Mapping[str, float | str], of: str, papers: Mapping[str, str], *, over: str) -> Iterator[Figure]:
    """Steps, and their ratios: of others' steps over ``auto``'s, or speed-ups over any other method."""
    base = steps[over]
    for method, step in steps.items():
        of_ratio = f"step over auto's, {of}, ratio" if over == "auto" else f"speed-up over {over}, {of}"
        names = (f"{method}: step, {of}, ms", f"{method}: {of_ratio}")
        if isinstance(step, str) or isinstance(base, str):
            reason = step if isinstance(step, str) else f"no {over} plan to compare with"
            yield from (missing_figure(name, reason, source="simulated") for name in names)
            continue
        yield Figure(name=names[0], source="simulated", value=step)
        ratio = step / base if over == "auto" else base / step
        labels = {"paper": papers[method]} if papers[method] else {}
        yield Figure(name=names[1], source="simulated", value=ratio, labels=labels)
