"""Modules on the simulated chip: alone, in groups of three sets, and in the stages of every form's plans."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from bench.cost.chip.machine import run_all
from bench.cost.chip.spec import Chip, Work, draw_work
from bench.cost.estimates import mean_figure
from bench.cost.forms import Fitted
from bench.cost.ground import ChipScale
from bench.cost.plans import FORM_WORDS, IN_TURN, SEARCH_LIMITS, planned_with, step_name
from bench.cost.truth import OTHER, SAME, Group, Member, Placed, Truth, draw_groups
from bench.record import Figure
from mosaic.cost import Bandwidths, CostModel
from mosaic.device import Device
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.plan import Plan
from mosaic.profile import Environment, PairSample, Phase, Profile, Sample
from mosaic.solver import solve
from mosaic.solver.options import QuotaGrid
from mosaic.solver.task import SearchOptions

HEAD = "simulated chip: "
GROUP_QUOTAS = (2, 3, 4, 6, 8, 10, 12)
ALONE_QUOTAS = (*GROUP_QUOTAS, 16)
SEED = 18
"""Of modules and groups; assumed coefficients of ``bench.cost.forms`` were looked at on other seeds."""
MAX_MODULES = 4
DEVICE = Device(name="simulated", kind="cuda", num_slots=Chip().num_sms)


def simulate_alone(chip: Chip, works: Sequence[Work], quotas: Sequence[int], degree: int = 1) -> tuple[Sample, ...]:
    """Returns what a profiler would see of modules alone, with their share of the chip's bandwidth."""
    asked = [(work, quota) for work in works for quota in quotas]
    ran = run_all(chip, [(((work.on_share(degree), quota),), 1000 * degree + quota) for work, quota in asked])
    return tuple(
        Sample(
            module=work.name,
            phase=Phase.FORWARD,
            degree=degree,
            quota=quota,
            times_ms=(one.time_ns / 1e6,),
            bandwidth_utilisation=min(1.0, one.bytes_per_ns / chip.dram_bytes_per_ns),
        )
        for (work, quota), (one,) in zip(asked, ran, strict=True)
    )


def drawn_works(scale: ChipScale, seed: int = SEED) -> list[Work]:
    """Returns the modules of all three sets."""
    return [draw_work(1000 * seed + number) for number in range(3 * scale.num_modules)]


def simulate_truth(scale: ChipScale, *, chip: Chip | None = None, seed: int = SEED) -> Truth:
    """Runs three sets of modules alone and in groups; only the first is fitted, and the second chooses."""
    chip, dice = chip or Chip(), random.Random(seed)
    count = scale.num_modules
    works = drawn_works(scale, seed)
    fitted, chosen, other = (works[start : start + count] for start in (0, count, 2 * count))
    samples = simulate_alone(chip, works, ALONE_QUOTAS)
    alone_ms = {(sample.module, sample.quota): sample.median_ms for sample in samples}
    by_name = {work.name: work for work in works}
    taken: set[frozenset[tuple[str, int]]] = set()

    def draw(of: Sequence[Work], num: int) -> tuple[Placed, ...]:
        return draw_groups(
            [work.name for work in of],
            sizes=scale.sizes,
            count=num,
            quotas=GROUP_QUOTAS,
            num_slots=chip.num_sms,
            dice=dice,
            taken=taken,
        )

    halves = tuple(
        ((one.name, chip.num_sms // 2), (two.name, chip.num_sms // 2))
        for index, one in enumerate(fitted)
        for two in fitted[index + 1 :]
    )
    taken.update(frozenset(pair) for pair in halves)
    drawn = {
        "pairs": halves,
        "fit": draw(fitted, scale.num_fit),
        "choose": draw(chosen, scale.num_choose),
        SAME: draw(fitted, scale.num_judge),
        OTHER: draw(other, scale.num_judge),
    }
    every = [(name, placed) for name, groups in drawn.items() for placed in groups]
    every += [("again", placed) for placed in drawn[SAME]]
    jobs = [
        (tuple((by_name[name], quota) for name, quota in placed), number) for number, (_, placed) in enumerate(every)
    ]
    ran: dict[str, list[Group]] = {name: [] for name in (*drawn, "again")}
    for (name, placed), found in zip(every, run_all(chip, jobs), strict=True):
        ran[name].append(
            tuple(
                Member(
                    module=module,
                    phase=Phase.FORWARD,
                    quota=quota,
                    alone_ms=alone_ms[module, quota],
                    beside_ms=one.time_ns / 1e6,
                )
                for (module, quota), one in zip(placed, found, strict=True)
            )
        )
    return Truth(
        source="simulated",
        head=HEAD,
        bandwidths=Bandwidths(samples),
        alone=samples,
        pairs=tuple(sample for group in ran["pairs"] for sample in _pair_samples(group)),
        fit=tuple(ran["fit"]),
        choose=tuple(ran["choose"]),
        judge={name: tuple(ran[name]) for name in (SAME, OTHER)},
        again=tuple(ran["again"]),
    )


def _pair_samples(group: Group) -> tuple[PairSample, ...]:
    return tuple(
        PairSample(
            module=one.module,
            beside=two.module,
            phase=one.phase,
            quota=one.quota,
            beside_quota=two.quota,
            times_ms=(one.beside_ms,),
            alone_ms=(one.alone_ms,),
        )
        for one, two in (group, group[::-1])
    )


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
