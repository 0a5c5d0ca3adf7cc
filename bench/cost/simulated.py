"""The same questions of two to eight modules, asked of a simulator: never in one figure with what was measured."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from bench.cost.figures import COUNTS, FORM_WORDS, RULES, absent, error_name, mean_figure, step_name
from bench.cost.fitting.fitted import InterferenceFit
from bench.cost.ground import Fits, Scale
from bench.cost.groups import fit_forms, measured_ms, predict_ms, split_runs
from bench.cost.plans import SEARCH_LIMITS
from bench.cost.simulator import DEVICE, Work, draw_works, measure_run, profile_of, run_plan_ms
from bench.record import Figure
from mosaic.cost import Bandwidths
from mosaic.microbench import Budget
from mosaic.solver import solve
from mosaic.solver.options import QuotaGrid
from mosaic.solver.task import SearchOptions

_NOISE = 0.01
_NUM_FIT = 24
_NUM_HELD = 10

Errors = dict[tuple[int, str], list[float]]
"""Prediction errors at held-out groups by number of modules and form."""


def simulated_names() -> tuple[str, ...]:
    """Returns the names of the simulated figures of held-out plans and of plans that ran."""
    named = (error_name, step_name)
    return tuple(name(n, form, rule=rule) for rule in RULES for name in named for n in COUNTS for form in FORM_WORDS)


def simulate_all(scale: Scale, budget: Budget) -> Iterator[Figure]:
    """Yields all figures of the simulator, all rules of sharing."""
    for rule in RULES:
        if not budget.allows(f"bandwidth shared {rule}"):
            continue
        found = [simulate(rule, seed) for seed in range(scale.seeds)]
        for count in COUNTS:
            for form in FORM_WORDS:
                errors = [error for _, _, of in found for error in of[count, form]]
                yield mean_figure(error_name(count, form, rule=rule), errors, source="simulated")
        for count in COUNTS:
            names = [step_name(count, form, rule=rule) for form in FORM_WORDS]
            if not budget.allows(f"simulated plans of {count} modules"):
                yield from absent(names, "no time was left", source="simulated")
                continue
            times = [
                {form: _plan_ms(works[:count], fits[form], rule, scale) for form in FORM_WORDS}
                for works, fits, _ in found
            ]
            for name, form in zip(names, FORM_WORDS, strict=True):
                ratios = [of[form] / of["none"] for of in times]
                yield mean_figure(name, ratios, source="simulated")


@cache
def simulate(rule: str, seed: int) -> tuple[tuple[Work, ...], Fits, Errors]:
    """Fits every form to designed groups of two to eight modules, with noise, and judges others of two to eight."""
    dice = random.Random(seed)
    works = draw_works(max(COUNTS), dice)
    profile = profile_of(works)
    bandwidths = Bandwidths(profile.samples)
    fit_runs, held = split_runs(
        profile.graph.names, bandwidths, DEVICE, num_fit=_NUM_FIT, num_held=_NUM_HELD, counts=COUNTS, seed=seed
    )
    fits = fit_forms([measure_run(works, run, rule, dice, _NOISE) for run in fit_runs], bandwidths)
    errors: Errors = {}
    for form, fit in fits.items():
        assert not isinstance(fit, str), fit
        cost = fit.cost(profile)
        for count, runs in held.items():
            groups = [measure_run(works, run, rule, dice, 0.0) for run in runs]
            errors[count, form] = [abs(predict_ms(cost, group) / measured_ms(group) - 1) for group in groups]
    return works, fits, errors


def _plan_ms(works: tuple[Work, ...], fit: InterferenceFit | str, rule: str, scale: Scale) -> float:
    """Time of a form's plan in the simulator, where who ends early leaves its bandwidth to the rest."""
    assert not isinstance(fit, str)
    profile = profile_of(works)
    cost = fit.cost(profile)
    search = SearchOptions(grid=QuotaGrid(step_slots=scale.step_slots), limits=SEARCH_LIMITS)
    return run_plan_ms(solve(profile.graph, cost, DEVICE, method="exact", search=search), works, rule)
