"""The plan that each model of interference leads to, really run (paper Fig. 12b)."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType

import torch

import mosaic
from bench.cost.estimates import absent
from bench.cost.forms import Fitted
from bench.cost.ground import Ground
from bench.cost.groups import SIZES
from bench.cost.models import NAMES
from bench.record import Figure, median_figure
from mosaic.cost import CostModel
from mosaic.engine import find_modules
from mosaic.plan import Plan
from mosaic.solver import solve
from mosaic.solver.limits import SearchLimits
from mosaic.solver.options import QuotaGrid
from mosaic.solver.task import SearchOptions

ALL = "all"
"""Stands for a model of all modules of the study where they do not fit on the device at once."""

FORM_WORDS: Mapping[str, str] = MappingProxyType(
    {"none": "interference-unaware", "full": "Eq. 8", "pairwise": "pairwise", "ours": "ours"}
)
"""Forms that plans are made with, and what figures call them."""

IN_TURN = "one after the other"
SEARCH_LIMITS = SearchLimits(effort=2.0)
"""Of the exact search; what it has not proven by then, it gives as it is."""

_MIN_ROUND_S = 0.02


def ms_name(count: int | str, of: str) -> str:
    """Names the time of a step; ``of`` says whose plan."""
    return f"step of the plan, ms, {count} modules, {of}"


def step_name(count: int | str, form: str) -> str:
    """Names what a form's plan takes, as a multiple of what the unaware plan takes; ``count`` may be ``ALL``."""
    return f"step of the plan over the unaware one's, {count} modules, {FORM_WORDS[form]}"


def plan_names() -> tuple[str, ...]:
    """Returns the names of figures of plans that ran."""
    return tuple(name for count in (*SIZES, ALL) for name in _names(count))


def measure_plans(ground: Ground) -> Iterator[Figure]:
    """Plans models of 2 to 8 modules with every form, and trains them by these plans in turn."""
    by_form = planned_with(ground.fits)
    modules = len(ground.names)
    for count in (*SIZES, ALL):
        if isinstance(count, int) and count > min(ground.num_slots, modules):
            yield from absent(_names(count), f"{ground.num_slots} {ground.unit}, {modules} modules in this study")
        elif count == ALL and modules in SIZES and modules <= ground.num_slots:
            yield from absent(_names(count), f"that is the figure of {modules} modules: they fit at once")
        elif not by_form:
            yield from absent(_names(count), "no interference was fitted")
        elif not ground.bench.budget.allows(f"plans of {count} modules"):
            yield from absent(_names(count), "no time was left")
        else:
            yield from _measure(ground, count, by_form)


def _names(count: int | str) -> list[str]:
    steps = [step_name(count, form) for form in FORM_WORDS if form != "none"]
    return [*steps, *(ms_name(count, of) for of in (*FORM_WORDS.values(), IN_TURN))]


def _measure(ground: Ground, name: int | str, by_form: Mapping[str, Fitted]) -> Iterator[Figure]:
    count = len(ground.names) if isinstance(name, str) else name
    plans = plan_with_all(ground, count, by_form)
    times = _run_in_turn(ground, count, {shape_of(plan): plan for plan in plans.values()})
    unaware = shape_of(plans[FORM_WORDS["none"]])
    for of, plan in plans.items():
        labels = {
            "plan": shape_of(plan),
            "predicted_ms": f"{plan.predicted_ms:.4g}",
            "modules": str(count),
            "side by side": str(max(len(stage.placements) for stage in plan.stages)),
        }
        yield replace(median_figure(ms_name(name, of), times[shape_of(plan)]), labels=labels)
    for form, words in FORM_WORDS.items():
        if words not in plans:
            yield from absent([step_name(name, form), ms_name(name, words)], "too few groups to fit it")
            continue
        if form == "none":
            continue
        mine = shape_of(plans[words])
        ratios = [ours / theirs for ours, theirs in zip(times[mine], times[unaware], strict=True)]
        yield replace(median_figure(step_name(name, form), ratios), labels={"same plan": str(mine == unaware)})


def planned_with(fits: Mapping[str, Fitted]) -> dict[str, Fitted]:
    """Returns the fits that plans are made with, by form."""
    return {
        one.studied.form: one
        for one in fits.values()
        if one.studied.form in FORM_WORDS and not one.studied.draws and one.studied.assumed is None
    }


def plan_with_all(ground: Ground, count: int, by_form: Mapping[str, Fitted]) -> dict[str, Plan]:
    """Returns the plan of every form that was fitted and the sequential one, by name."""
    model, inputs = ground.model_of(NAMES[:count])
    graph = find_modules(model, inputs, include=["branches.*"]).graph
    profile = ground.profile
    profile = replace(
        profile,
        graph=graph,
        samples=tuple(s for s in profile.samples if s.module in graph.names and s.degree == 1),
        memory=tuple(entry for entry in profile.memory if entry.module in graph.names),
        structures=(),
        shapes=tuple(shape for shape in profile.shapes if shape.module in graph.names),
        held_out=(),
    )
    search = SearchOptions(limits=SEARCH_LIMITS, grid=QuotaGrid(step_slots=max(1, ground.num_slots // 8)))
    plans: dict[str, Plan] = {}
    for form, words in FORM_WORDS.items():
        if form not in by_form:
            continue
        cost = CostModel.from_profile(
            profile, interference=form, coefficients=by_form[form].coefficients, estimate=ground.bandwidths
        )
        plans[words] = solve(graph, cost, ground.bench.device, search=search)
        if form == "none":
            plans[IN_TURN] = solve(graph, cost, ground.bench.device, method="sequential")
    return plans


def shape_of(plan: Plan) -> str:
    """Says which modules run where: what decides how long a plan really takes."""
    stages = ("+".join(f"{p.module.rpartition('.')[2]}:{p.quota}" for p in s.placements) for s in plan.stages)
    return " | ".join(stages)


def _run_in_turn(ground: Ground, count: int, plans: Mapping[str, Plan]) -> dict[str, list[float]]:
    """Takes training steps by each plan, in rounds, all from the same weights."""
    original, inputs = ground.model_of(NAMES[:count])
    times: dict[str, list[float]] = {shape: [] for shape in plans}
    with ExitStack() as stack:
        models = {}
        for shape, plan in plans.items():
            model = copy.deepcopy(original)
            handle = mosaic.colocate(
                model, sample=inputs, modules=["branches.*"], plan=plan, backend=ground.bench.backend
            )
            stack.callback(handle.remove)
            models[shape] = model
        slowest = max(_steps_ms(ground, models[shape], inputs, 2) for shape in plans)  # and warm-up
        steps = max(1, round(_MIN_ROUND_S * 1e3 / slowest))
        for number in range(ground.scale.rounds):
            if number >= 2 and not ground.bench.budget.allows(f"plans of {count} modules, rounds from {number + 1} on"):
                break
            shapes, first = list(plans), number % len(plans)
            for shape in (*shapes[first:], *shapes[:first]):
                times[shape].append(_steps_ms(ground, models[shape], inputs, steps))
    return times


def _steps_ms(ground: Ground, model: torch.nn.Module, inputs: Mapping[str, object], steps: int) -> float:
    ground.bench.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        model(**inputs).backward()
        model.zero_grad(set_to_none=True)
    ground.bench.synchronize()
    return (time.perf_counter() - start) * 1e3 / steps
