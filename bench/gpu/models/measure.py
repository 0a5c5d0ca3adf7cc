"""The whole engine: a training step of six models, plain in several ways and with Mosaic, beside what is possible.

In order of worth: everything that needs no profile comes first, and each figure goes out as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType

from bench.gpu.bench import Bench
from bench.gpu.models.rounds import Rounds
from bench.gpu.models.variants import (
    MAX_BATCH,
    PlainStreams,
    Step,
    Workload,
    colocated,
    lanes_of,
    samples_that_fit,
    whole_step_graph,
)
from bench.record import Figure, missing_figure
from bench.roofline import count_step
from mosaic.cost import CostModel
from mosaic.device import Device
from mosaic.engine import find_modules
from mosaic.engine.finding.find import Finding
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, plan_from_quotas
from mosaic.profiler import ProfileSettings, profile_modules
from mosaic.solver import solve

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Of the device's slots."""
LONG_STEP_MS = 50.0
"""A plain step that takes longer is long: at an eighth of the device all modules together take up to eight times as
long, about four times over."""
MAX_PAIRS = 6
PROFILE = "a profile"
ONE_GRAPH = "plain, one CUDA graph"
BY_HAND = "even split by hand"
EVEN_VARIANTS = ("plain streams", "green lanes", "green lanes, graphs", "green lanes, SM targets")
IN_TURN = "mosaic, one after the other"
"""The variant that shows what Mosaic itself costs: the sequential plan."""
WORTH = MappingProxyType(
    {
        ONE_GRAPH: 1.0,
        **dict.fromkeys(EVEN_VARIANTS, 1.0),
        PROFILE: 2.0,
        "mosaic": 1.0,
        "mosaic, graphs": 1.0,
        IN_TURN: 0.5,
    }
)
"""Measurements after the plain step, in order, with their shares of the time left for them and all later ones."""


def measure_model(bench: Bench, *, name: str, batch: int) -> Iterator[Figure]:
    """Measures every variant of one model at one batch; what cannot be had is a figure with a reason.

    Where memory holds fewer samples than the largest batch, that one is measured with as many as it holds, and the
    batches between are left out.
    """
    if not bench.dry_run:
        most = samples_that_fit(name, bench.device.memory_bytes)
        if most <= batch < MAX_BATCH:
            bench.verdict = f"measured as models/{name}/{MAX_BATCH}: memory holds a batch of {most}"
            return
    work = Workload(name, batch, bench)
    bench.notes.append(work.note)
    for figure in _measure(work, bench):
        figure.labels.update(model=name, batch=str(work.batch))
        yield figure


def _measure(work: Workload, bench: Bench) -> Iterator[Figure]:
    rounds = Rounds(work, bench, WORTH)
    yield from rounds.measure_plain()
    yield from rounds.measure(ONE_GRAPH, lambda: whole_step_graph(work, bench))
    try:
        finding = find_modules(work.model, work.loss, include=work.modules)
    except Exception as error:
        yield from _none_of((*EVEN_VARIANTS, "mosaic", "mosaic, graphs", IN_TURN), error)
        return
    even = even_plan(finding.graph, bench.device)
    if even.is_colocated:
        yield from _by_hand(even, rounds)
    else:
        yield from _none_of(EVEN_VARIANTS, "no two modules are independent of each other")
    yield from _bound(work, bench)
    yield from _by_plan(even, finding, rounds)
    in_turn = _in_turn(finding.graph, bench)
    yield from rounds.measure(IN_TURN, lambda: colocated(work, in_turn, bench.backend), {"plan": "sequential"})


def _none_of(variants: tuple[str, ...], reason: object) -> Iterator[Figure]:
    yield from (missing_figure("step_ms", reason, {"variant": variant}) for variant in variants)


def _by_hand(even: Plan, rounds: Rounds) -> Iterator[Figure]:
    """Runs the even split on each kind of lanes."""
    work, bench, by = rounds.work, rounds.bench, {"plan": BY_HAND}
    plain, eager, graphs, targeted = EVEN_VARIANTS
    bench.notes.append(f"{BY_HAND}: {_plan_text(even)}")

    def lanes(*, sm_target: bool = False, captured: bool = False) -> AbstractContextManager[tuple[Step, Step]]:
        return colocated(work, even, lanes_of(bench, sm_target=sm_target), graphs=captured)

    yield from rounds.measure(plain, lambda: colocated(work, even, PlainStreams(bench.backend)), by)
    yield from rounds.measure(eager, lanes, by)
    yield from rounds.measure(graphs, lambda: lanes(captured=True), by, captures=True)
    won = rounds.won(graphs, over=eager)
    by = by | {"launching": "captured" if won else "eager"}
    yield from rounds.measure(targeted, lambda: lanes(sm_target=True, captured=won), by, captures=won)


def _by_plan(even: Plan, finding: Finding, rounds: Rounds) -> Iterator[Figure]:
    """Profiles, solves, and runs that plan; by graphs where these were faster on the even split."""
    work, bench = rounds.work, rounds.bench
    plan, method = None, ""
    seconds = rounds.share_s(PROFILE)
    if bench.budget.allows("a profile, and with it the plan that is solved"):
        try:
            plan, method = _plan(rounds, finding, seconds)
        except Exception as error:
            yield missing_figure("plan", error, {"variant": "mosaic"})
    if plan is not None:
        yield Figure(
            name="predicted_speedup", source="predicted", value=plan.predicted_speedup, labels={"plan": method}
        )
    if plan is None or not plan.is_colocated:
        why = f"stepped aside: no plan is predicted to be faster than one module after the other ({method})"
        yield missing_figure("step_ms", why if plan is not None else "there is no plan", {"variant": "mosaic"})
        if not bench.dry_run or not even.is_colocated:
            return
        plan, method = even, BY_HAND  # a rehearsal goes on all the same
    bench.notes.append(f"plan ({method}): " + _plan_text(plan))
    by = {"plan": method}
    yield from rounds.measure("mosaic", lambda: colocated(work, plan, bench.backend), by)
    if rounds.won("green lanes, graphs", over="green lanes"):
        graphs = partial(colocated, work, plan, bench.backend, graphs=True)
        yield from rounds.measure("mosaic, graphs", graphs, by, captures=True)
    else:
        yield from _none_of(("mosaic, graphs",), "graphs were not faster on the even split")


def _plan(rounds: Rounds, finding: Finding, seconds: float) -> tuple[Plan, str]:
    """Profiles, for so many seconds, and solves; returns the plan and the method that found it."""
    work, bench = rounds.work, rounds.bench
    quotas, note = quotas_for(bench.device.num_slots, rounds.plain_ms)
    bench.notes += [note] if note else []
    settings = ProfileSettings(
        max_seconds=seconds,
        warmup=1,
        min_repeats=2,
        max_repeats=3,
        sample_seconds=0.15,
        pairs=len(finding.graph.names) <= MAX_PAIRS,
    )
    if not settings.pairs:
        bench.notes.append(f"planned without interference: {len(finding.graph.names)} modules make too many pairs")
    profile = profile_modules(
        work.model, finding.subjects, finding.graph, bench.backend, quotas=quotas, settings=settings
    )
    bench.notes += [f"not profiled: {what}" for what in profile.left_out]
    plan = solve(finding.graph, CostModel.from_profile(profile), bench.device)
    return plan, plan.search.method


def quotas_for(num_slots: int, step_ms: float) -> tuple[tuple[int, ...], str | None]:
    """Returns quotas in slots, rising, and a note where a long plain step leaves out those under a quarter."""
    quotas = sorted({max(1, round(num_slots * share)) for share in SHARES})
    kept = [quota for quota in quotas if step_ms <= LONG_STEP_MS or 4 * quota >= num_slots]
    if len(kept) == len(quotas):
        return tuple(kept), None
    left_out = ", ".join(str(quota) for quota in quotas if quota not in kept)
    return tuple(kept), (
        f"not profiled at {left_out} of {num_slots} slots: a plain step takes {step_ms:.0f} ms, more than "
        f"{LONG_STEP_MS:.0f} ms, and quotas under a quarter of the device would take most of the time"
    )


def _bound(work: Workload, bench: Bench) -> Iterator[Figure]:
    try:
        count = count_step(work.model, work.loss)
    except Exception as error:
        yield missing_figure("bound_ms", error, source="predicted")
        return
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


def _in_turn(graph: ModuleGraph, bench: Bench) -> Plan:
    """Returns the plan that can gain nothing: one module after the other, each on the whole device."""
    stages = [{name: bench.device.num_slots} for name in graph.topological_order()]
    return plan_from_quotas(stages, graph=graph, device=bench.device)


def even_plan(graph: ModuleGraph, device: Device) -> Plan:
    """Returns stages by depth in the graph, each with the slots in equal parts."""
    slots = device.num_slots
    depth: dict[str, int] = {}
    for name in graph.topological_order():
        depth[name] = max((depth[source] + 1 for source in graph.predecessors(name)), default=0)
    stages = []
    for level in range(max(depth.values()) + 1):
        names = [name for name in graph.names if depth[name] == level]
        for first in range(0, len(names), slots):
            group = names[first : first + slots]
            stages.append({name: slots // len(group) for name in group})
    return plan_from_quotas(stages, graph=graph, device=device)


def _plan_text(plan: Plan) -> str:
    stages = (" | ".join(f"{p.module} {p.quota}" for p in stage.placements) for stage in plan.stages)
    return " ; ".join(stages)
