"""The whole engine: a training step of six models, plain in several ways and with Mosaic, beside what is possible."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from bench.gpu_bench import Bench
from bench.gpu_tables import MOST_LOSS_DIFFERENCE
from bench.gpu_variants import PlainStreams, Step, Workload, colocated, whole_step_graph
from bench.record import Figure, median_figure, missing_figure
from bench.roofline import count_step
from bench.zoo import NOTES
from mosaic.cost import CostModel
from mosaic.engine import find_modules
from mosaic.errors import MosaicError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, plan_from_quotas
from mosaic.profiler import ProfileSettings, profile_modules
from mosaic.solver import solve

WARM_STEPS = 5
"""Steps before anything counts: libraries choose their kernels, and stages are captured after a few calls."""
ROUND_S = 0.06
MOST_PAIRS = 6
IN_TURN = "mosaic, one after the other"
"""The variant that shows what Mosaic itself costs: the sequential plan."""


def measure_model(bench: Bench, *, name: str, batch: int) -> Iterator[Figure]:
    """Measures every variant of one model at one batch; what cannot be had is a figure with a reason."""
    for figure in _measure(name, batch, bench):
        figure.labels.update(model=name, batch=str(batch))
        yield figure


def _measure(name: str, batch: int, bench: Bench) -> Iterator[Figure]:
    bench.notes.append(NOTES[name])
    work = Workload(name, batch, bench)
    work.step()  # the optimizer makes its state
    yield from _bound(work, bench)
    plain = work.losses(work.step)
    times = [_time_ms(work.step, bench, 1) for _ in range(3)]
    steps = max(1, round(ROUND_S * 1e3 / statistics.median(times))) if not bench.dry_run else 1
    yield median_figure("step_ms", [_time_ms(work.step, bench, steps) for _ in range(3)], labels={"variant": "plain"})
    yield from _peak(bench, "plain")
    runs = Runs(work, bench, plain, steps)
    yield from runs.measure("plain, one CUDA graph", lambda: whole_step_graph(work, bench))
    yield from _with_mosaic(work, bench, runs)


def _bound(work: Workload, bench: Bench) -> Iterator[Figure]:
    count = count_step(work.model, work.loss)
    for name, value in (
        ("step_tflop", count.flops / 1e12),
        ("step_moved_gb", count.moved_bytes / 1e9),
        ("parameters_billion", count.parameters / 1e9),
    ):
        yield Figure(name=name, source="predicted", value=value, labels={})
    ceilings = [bench.value_of("ceilings", name) for name in ("bf16_tflops", "copy_gb_per_s")]
    if ceilings[0] is None or ceilings[1] is None:
        yield Figure(
            name="bound_ms", source="predicted", value=None, reason="the ceilings were not measured", labels={}
        )
    else:
        bound = count.bound_ms(ceilings[0], ceilings[1])
        yield Figure(name="bound_ms", source="predicted", value=bound, labels={})


class Runs:
    """Measures variants against the plain loop, in rounds in which the two take turns."""

    def __init__(self, work: Workload, bench: Bench, plain: list[float], steps: int) -> None:
        self.work = work
        self.bench = bench
        self.plain = plain
        self.steps = steps

    def measure(
        self,
        name: str,
        opened: Callable[[], AbstractContextManager[tuple[Step, Step]]],
        labels: dict[str, str] | None = None,
    ) -> Iterator[Figure]:
        """Yields time, speed-up, difference of losses and memory of a variant, or the reason why there are none."""
        labels = {"variant": name, **(labels or {})}
        if not self.bench.budget.allows(name):
            yield missing_figure("step_ms", "no time was left", labels)
            return
        try:
            with opened() as (plain_step, step):
                yield from self._rounds(plain_step, step, labels)
        except Exception as error:
            yield missing_figure("step_ms", error, labels)
        finally:
            _tidy(self.bench)

    def _rounds(self, plain_step: Step, step: Step, labels: dict[str, str]) -> Iterator[Figure]:
        for _ in range(WARM_STEPS if "graph" in labels["variant"] else 1):
            step()
        losses = self.work.losses(step)
        far = max(abs(a - b) / max(1e-9, abs(b)) for a, b in zip(losses, self.plain, strict=True))
        for each in (plain_step, step):
            _time_ms(each, self.bench, 1)
        plain, ours = [], []
        for number in range(2 if self.bench.dry_run else 7):
            if number >= 2 and not self.bench.budget.allows(f"{labels['variant']}: rounds from {number + 1} on"):
                break
            plain.append(_time_ms(plain_step, self.bench, self.steps))
            ours.append(_time_ms(step, self.bench, self.steps))
        yield median_figure("step_ms", ours, labels=labels)
        ratios = [theirs / mine for theirs, mine in zip(plain, ours, strict=True)]
        yield median_figure("speedup", ratios, labels=labels)
        yield Figure(name="loss_difference", source="measured", value=far, labels=labels)
        if not far <= MOST_LOSS_DIFFERENCE:  # also catches NaN
            self.bench.notes.append(
                f"{labels['variant']}: losses differ by {far:.3g} of theirs: its times do not count"
            )
        yield from _peak(self.bench, labels["variant"])


def _with_mosaic(work: Workload, bench: Bench, runs: Runs) -> Iterator[Figure]:
    """Profiles once, plans once, and runs that plan on each kind of lanes."""
    variants = ("plain streams", "mosaic", "mosaic, graphs")
    try:
        finding = find_modules(work.model, work.loss, include=work.modules)
    except MosaicError as error:
        yield from (missing_figure("step_ms", error, {"variant": variant}) for variant in variants)
        return
    plan, method = None, ""
    if bench.budget.allows("a profile, and with it all variants that need a plan"):
        try:
            plan, method = _plan(work, finding, bench)
            yield Figure(
                name="predicted_speedup", source="predicted", value=plan.predicted_speedup, labels={"plan": method}
            )
        except Exception as error:
            yield missing_figure("plan", error, {"variant": "mosaic"})
    if plan is not None and not plan.is_colocated:
        yield missing_figure(
            "step_ms",
            f"stepped aside: no plan is predicted to be faster than one module after the other ({method})",
            {"variant": "mosaic"},
        )
    if plan is None or not plan.is_colocated:
        plan, method = even_plan(finding.graph, bench), "even split by hand"
    if not plan.is_colocated:
        yield missing_figure("step_ms", "no two modules are independent of each other", {"variant": "mosaic"})
        return
    bench.notes.append(f"plan ({method}): " + _plan_text(plan))
    by = {"plan": method}
    yield from runs.measure("mosaic", lambda: colocated(work, plan, bench.backend), by)
    yield from runs.measure("mosaic, graphs", lambda: colocated(work, plan, bench.backend, graphs=True), by)
    yield from runs.measure("plain streams", lambda: colocated(work, plan, PlainStreams(bench.backend)), by)
    in_turn = _in_turn(finding.graph, bench)
    yield from runs.measure(IN_TURN, lambda: colocated(work, in_turn, bench.backend), {"plan": "sequential"})


def _plan(work: Workload, finding: Any, bench: Bench) -> tuple[Plan, str]:
    slots = bench.device.num_slots
    quotas = {max(1, round(slots * share)) for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)}
    settings = ProfileSettings(
        warmup=1,
        min_repeats=2,
        max_repeats=3,
        sample_seconds=0.15,
        refuse_share=2.0,
        pairs=len(finding.graph.names) <= MOST_PAIRS,
    )
    if not settings.pairs:
        bench.notes.append(f"planned without interference: {len(finding.graph.names)} modules make too many pairs")
    profile = profile_modules(
        work.model, finding.subjects, finding.graph, bench.backend, quotas=quotas, settings=settings
    )
    plan = solve(finding.graph, CostModel.from_profile(profile), bench.device)
    return plan, plan.search.method


def _in_turn(graph: ModuleGraph, bench: Bench) -> Plan:
    """Returns the plan that can gain nothing: one module after the other, each on the whole device."""
    stages = [{name: bench.device.num_slots} for name in graph.topological_order()]
    return plan_from_quotas(stages, graph=graph, device=bench.device)


def even_plan(graph: ModuleGraph, bench: Bench) -> Plan:
    """Returns stages by depth in the graph, each with the slots in equal parts."""
    slots = bench.device.num_slots
    depth: dict[str, int] = {}
    for name in graph.topological_order():
        depth[name] = max((depth[source] + 1 for source in graph.predecessors(name)), default=0)
    stages = []
    for level in range(max(depth.values()) + 1):
        names = [name for name in graph.names if depth[name] == level]
        for first in range(0, len(names), slots):
            group = names[first : first + slots]
            stages.append({name: slots // len(group) for name in group})
    return plan_from_quotas(stages, graph=graph, device=bench.device)


def _plan_text(plan: Plan) -> str:
    stages = (" | ".join(f"{p.module} {p.quota}" for p in stage.placements) for stage in plan.stages)
    return " ; ".join(stages)


def _time_ms(step: Step, bench: Bench, steps: int) -> float:
    bench.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    bench.synchronize()
    return (time.perf_counter() - start) * 1e3 / steps


def _peak(bench: Bench, variant: str) -> Iterator[Figure]:
    if bench.on_gpu:
        peak = torch.cuda.max_memory_allocated(bench.torch_device)
        yield Figure(name="peak_gib", source="measured", value=peak / 2**30, labels={"variant": variant})
        torch.cuda.reset_peak_memory_stats(bench.torch_device)


def _tidy(bench: Bench) -> None:
    if bench.on_gpu:
        torch.cuda.synchronize(bench.torch_device)
        torch.cuda.empty_cache()
