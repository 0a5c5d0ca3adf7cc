"""The plan that each form leads to, for modules that no fit saw, and what its stages take on the simulated chip."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from bench.cost.chip.spec import Chip
from bench.cost.figures import mean_figure
from bench.cost.interference.chip_groups import HEAD, drawn_works
from bench.cost.interference.forms import Fitted
from bench.cost.interference.plans import FORM_WORDS, SEARCH_LIMITS, planned_with, step_name
from bench.cost.interference.truth import Placed, Truth
from bench.cost.simulate import ChipScale, run_all
from bench.record import Figure
from mosaic.cost import CostModel
from mosaic.device import Device
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.plan import Plan
from mosaic.profile import Environment, Phase, Profile, Sample
from mosaic.solver import solve
from mosaic.solver.options import QuotaGrid
from mosaic.solver.task import SearchOptions

MAX_MODULES = 4
DEVICE = Device(name="simulated", kind="cuda", num_slots=Chip().num_sms)
IN_TURN = "one after the other"


def chip_plan_names() -> tuple[str, ...]:
    """Returns the names of the figures."""
    steps = (step_name("drawn", form) for form in FORM_WORDS if form != "none")
    return (*(HEAD + name for name in steps), f"{HEAD}step of modules {IN_TURN} over the unaware plan's")


def simulate_plans(truth: Truth, fits: Mapping[str, Fitted], scale: ChipScale) -> Iterator[Figure]:
    """Plans models of modules that judge with every form, and runs the stages of the plans."""
    dice, by_form = random.Random(0), planned_with(fits)
    works = {work.name: work for work in drawn_works(scale)[2 * scale.num_modules :]}
    ratios: dict[str, list[float]] = {}

    @cache
    def stage_ns(placed: Placed) -> float:
        (ran,) = run_all(Chip(), [(tuple((works[name], quota) for name, quota in placed), 0)])
        return max(one.time_ns for one in ran)

    def step_ns(plan: Plan) -> float:
        return sum(stage_ns(tuple(sorted((p.module, p.quota) for p in stage.placements))) for stage in plan.stages)

    for _ in range(scale.num_plans):
        names = sorted(dice.sample(sorted(works), min(MAX_MODULES, len(works))))
        profile = _profile_of([sample for sample in truth.alone if sample.module in names], names)
        unaware = step_ns(_plan(profile, by_form["none"], "exact"))
        ratios.setdefault(IN_TURN, []).append(step_ns(_plan(profile, by_form["none"], "sequential")) / unaware)
        for form, fitted in by_form.items():
            if form != "none":
                ratios.setdefault(form, []).append(step_ns(_plan(profile, fitted, "exact")) / unaware)
    forms = [form for form in FORM_WORDS if form != "none"]
    for name, form in zip(chip_plan_names(), (*forms, IN_TURN), strict=True):
        yield mean_figure(name, ratios.get(form, ()), source="simulated", reason="too few groups to fit it")


def _plan(profile: Profile, fitted: Fitted, method: str) -> Plan:
    cost = CostModel.from_profile(profile, interference=fitted.studied.form, coefficients=fitted.coefficients)
    search = SearchOptions(limits=SEARCH_LIMITS, grid=QuotaGrid(step_slots=2))
    return solve(profile.graph, cost, DEVICE, method=method, search=search)


def _profile_of(samples: Sequence[Sample], names: Sequence[str]) -> Profile:
    """Both phases alike: what is simulated of a module is one phase."""
    nodes = tuple(ModuleNode(name=name, num_parameters=1) for name in names)
    return Profile(
        device=DEVICE,
        graph=ModuleGraph(modules=nodes),
        samples=tuple(replace(sample, phase=phase) for sample in samples for phase in Phase),
        environment=Environment(torch_version="", python_version="", created="", foreign_cpu_share=0.0),
    )
