"""The same questions of two to eight modules, asked of a simulator: never in one figure with what was measured."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from bench.cost.figures import COUNTS, FORMS, RULES, absent, error_name, mean_figure, step_name
from bench.cost.ground import Scale
from bench.cost.plans import SEARCH_LIMITS
from bench.cost.simulator import DEVICE, Work, draw_works, measure_run, profile_of, run_plan_ms
from bench.cost_groups import Judged, measured_ms, predict_ms
from bench.cost_runs import split_runs
from bench.record import Figure
from mosaic.cost import Bandwidths, CostModel, InterferenceFit, fit_interference
from mosaic.cost.fit import Form
from mosaic.microbench import Budget
from mosaic.solver import solve
from mosaic.solver.options import QuotaGrid
from mosaic.solver.solve import SearchOptions

_NOISE = 0.01
_NUM_FIT = 24
_NUM_HELD = 10


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulated model: its modules, the fits to designed groups, and how they did at held-out ones."""

    works: tuple[Work, ...]
    fits: dict[Form, InterferenceFit]
    judged: tuple[Judged, ...]


@cache
def simulate(rule: str, seed: int) -> Simulated:
    """Fits every form to designed groups of two to eight modules, with noise, and judges others of two to eight."""
    dice = random.Random(seed)
    works = draw_works(max(COUNTS), dice)
    names = [work.name for work in works]
    bandwidths = Bandwidths(profile_of(works, ()).samples)
    split = split_runs(names, bandwidths, DEVICE, num_fit=_NUM_FIT, num_held=_NUM_HELD, counts=COUNTS, seed=seed)
    groups = [measure_run(works, run, rule, dice, _NOISE) for run in split.fit]
    fits = {form: fit_interference(groups, bandwidths, form, device=DEVICE) for form in FORMS}
    judged = []
    for form, fit in fits.items():
        cost = CostModel.from_profile(profile_of(works, ()), interference=form, fit=fit)
        for count, runs in split.held.items():
            for run in runs:
                group = measure_run(works, run, rule, dice, 0.0)
                predicted, seen = predict_ms(cost, group), measured_ms(group)
                judged.append(Judged(count=count, form=form, predicted_ms=predicted, measured_ms=seen))
    return Simulated(works, fits, tuple(judged))


def simulate_groups(found: Sequence[Simulated], rule: str) -> Iterator[Figure]:
    """Yields the errors of every form for every number of modules."""
    for count in COUNTS:
        for form in FORMS:
            errors = [j.error for one in found for j in one.judged if (j.count, j.form) == (count, form)]
            yield mean_figure(error_name(count, form, rule=rule), errors, source="simulated")


def simulate_plans(found: Sequence[Simulated], rule: str, scale: Scale, budget: Budget) -> Iterator[Figure]:
    """Yields what every form's plan takes in the simulator, where who ends early leaves its bandwidth to the rest."""
    for count in COUNTS:
        if not budget.allows(f"simulated plans of {count} modules"):
            names = [step_name(count, form, rule=rule) for form in FORMS]
            yield from absent(names, "no time was left", source="simulated")
            continue
        ratios: dict[Form, list[float]] = {form: [] for form in FORMS}
        for one in found:
            times = {form: _plan_ms(one, count, form, rule, scale) for form in FORMS}
            for form in FORMS:
                ratios[form].append(times[form] / times["none"])
        for form in FORMS:
            yield mean_figure(step_name(count, form, rule=rule), ratios[form], source="simulated")


def _plan_ms(one: Simulated, count: int, form: Form, rule: str, scale: Scale) -> float:
    works = one.works[:count]
    profile = profile_of(works, ())
    cost = CostModel.from_profile(profile, interference=form, fit=one.fits[form])
    search = SearchOptions(grid=QuotaGrid(step_slots=scale.step_slots), limits=SEARCH_LIMITS)
    plan = solve(profile.graph, cost, DEVICE, method="exact", search=search)
    return run_plan_ms(plan, works, rule)


def simulate_all(scale: Scale, budget: Budget) -> Iterator[Figure]:
    """Yields all figures of the simulator, all rules of sharing."""
    for rule in RULES:
        found = [simulate(rule, seed) for seed in range(scale.seeds)]
        yield from simulate_groups(found, rule)
        yield from simulate_plans(found, rule, scale, budget)
