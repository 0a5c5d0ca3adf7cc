"""``bench_cost``: every figure by name, nothing that judges was fitted, and what cannot be had says so."""

from __future__ import annotations

import random

import pytest

from bench.cost import __main__ as bench_cost
from bench.cost import simulated
from bench.cost import study as cost_study
from bench.cost.chip.machine import Ran
from bench.cost.chip.spec import Chip, draw_work
from bench.cost.chip_curves import FEW_QUOTAS, count_work, described
from bench.cost.forms import STUDIED, Fitted
from bench.cost.ground import TINY, ChipScale, Ground
from bench.cost.groups import draw_sets
from bench.cost.simulated import HEAD, simulate_alone, simulate_truth
from bench.cost.study import CostStudy
from bench.cost.surfaces import (
    AT_DEGREES,
    AT_QUOTAS,
    CHOSEN,
    SHAPED,
    SurfaceTruth,
    curves_of,
    judge_surfaces,
    surface_errors,
    surface_names,
)
from bench.cost.truth import OTHER, SAME
from bench.gpu.bench import Bench
from bench.record import Study
from mosaic import artifact
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget
from mosaic.profile import Phase, Sample

SMALL = ChipScale(num_modules=2, sizes=(2,), num_fit=1, num_choose=1, num_judge=1, num_plans=1, num_chips=1)


def bench_of(num_slots=2, seconds=60.0):
    return Bench(backend=HostBackend(num_slots), budget=Budget(seconds), dry_run=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One run of the measured study at its smallest; two cores are made of whatever is here."""
    path = tmp_path_factory.mktemp("study") / "study.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_cost, "HostBackend", lambda: HostBackend(2))
        made = bench_cost.study(TINY, seconds=3.0, path=path, only="measured")
    return made, path


def names_of(source):
    return sorted(n for part in CostStudy(bench_of(), TINY).all_parts() if part.source == source for n in part.names)


def test_every_figure_is_written_once_by_name_and_can_be_read(written):
    made, path = written
    assert artifact.load(Study, path) == made
    assert sorted(figure.name for figure in made.figures) == names_of("measured")
    assert {figure.source for figure in made.figures} == {"measured"}


def test_a_figure_without_a_number_has_a_reason_and_one_with_a_number_its_samples(written):
    for figure in written[0].figures:
        assert figure.samples if figure.value is not None else figure.reason, figure.name


def test_more_modules_than_cores_are_absent_with_the_reason(written):
    figures = {figure.name: figure for figure in written[0].figures}
    absent = figures[f"slowdown in {SAME}, 3 modules"]
    assert (absent.value, absent.reason) == (None, "2 cores and 3 modules in this study")


def test_without_time_every_figure_is_named_and_a_part_that_fails_costs_its_own_only(monkeypatch):
    def fail(ground):
        raise RuntimeError("the fan fell off")

    monkeypatch.setattr(cost_study, "measure_surface", fail)
    figures = list(CostStudy(bench_of(seconds=0.0), TINY).run())
    failed = {figure.name for figure in figures if "the fan fell off" in figure.reason}
    assert set(surface_names()) <= failed
    assert not any(name.startswith(HEAD) for name in failed)
    assert sorted(figure.name for figure in figures) == sorted([*names_of("measured"), *names_of("simulated")])
    assert all((figure.source == "simulated") == figure.name.startswith("simulated") for figure in figures)
    assert all(figure.reason for figure in figures if figure.value is None)


@pytest.mark.parametrize(("num_slots", "num_modules"), [(2, 4), (2, 8), (16, 8)])
def test_no_measured_group_is_in_two_sets(num_slots, num_modules):
    sizes = [size for size in (2, 4, 8) if size <= min(num_slots, num_modules)]
    sets = draw_sets("abcdefgh"[:num_modules], num_slots, sizes, 4)
    groups = [frozenset(placed) for of in sets for placed in of]
    assert len(set(groups)) == len(groups)
    assert all(sets)


def quick_run(chip, jobs):
    """Stands for the chip: work over slots, and a tenth more for each neighbour."""
    return [
        tuple(
            Ran(time_ns=1e5 / sms * (1 + 0.1 * (len(placed) - 1)), bytes_per_ns=9.0 * sms, from_dram=0.5)
            for _, sms in placed
        )
        for placed, _ in jobs
    ]


@pytest.fixture(scope="module")
def truth():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "run_all", quick_run)
        return simulate_truth(SMALL)


def test_every_form_that_was_fitted_plans_for_modules_of_the_set_that_judges(truth, monkeypatch):
    monkeypatch.setattr(simulated, "run_all", quick_run)
    fits = {"unaware": Fitted(studied=STUDIED[0], coefficients={}, num_free=0)}
    figures = {figure.name: figure for figure in simulated.simulate_plans(truth, fits, SMALL)}
    assert set(figures) == set(simulated.chip_plan_names())
    *forms, in_turn = figures.values()
    assert {figure.reason for figure in forms} == {"too few groups to fit it"}
    assert in_turn.value >= 1


def test_modules_of_the_set_that_judges_are_neither_fitted_nor_chosen_by(truth):
    fitted, chosen, judging = (
        {member.module for group in of for member in group} for of in (truth.fit, truth.choose, truth.judge[OTHER])
    )
    assert not (fitted | chosen) & judging
    assert not fitted & chosen
    assert {member.module for group in truth.judge[SAME] for member in group} <= fitted
    assert len(truth.pairs) == 2


def test_what_counting_says_of_a_simulated_module_is_less_than_what_it_takes():
    work, chip = draw_work(5), Chip()
    (alone,) = simulate_alone(chip, [work], (16,))
    moved = count_work(work).moved_bytes
    seen = alone.bandwidth_utilisation * chip.dram_bytes_per_ns * alone.median_ms * 1e6
    assert 0.2 * moved < seen < 1.5 * moved
    assert described().num_slots == chip.num_sms


def test_a_point_in_both_is_refused():
    samples = [Sample(module="m", phase=Phase.FORWARD, quota=q, times_ms=(1.0 / q,)) for q in (1, 2, 4)]
    with pytest.raises(ValueError, match="1 points are fitted and held out"):
        surface_errors(samples, samples[:1], {})
    held = Sample(module="m", phase=Phase.FORWARD, quota=3, times_ms=(1 / 3,))
    assert surface_errors(samples, [held], {}) == {"m": [pytest.approx(0, abs=1e-9)]}


def test_surfaces_are_judged_on_modules_that_did_not_choose():
    dice = random.Random(0)

    def sample(module: str, quota: int) -> Sample:
        time = (10 / quota + 1) * dice.uniform(0.99, 1.01)
        return Sample(module=module, phase=Phase.FORWARD, quota=quota, times_ms=(time,))

    every = [sample(module, quota) for module in "ab" for quota in range(1, 17)]
    grid = (1, 2, 4, 8, 12, 16)
    truth = SurfaceTruth(
        source="simulated",
        head="",
        fit=tuple(one for one in every if one.quota in grid),
        held={AT_QUOTAS: tuple(one for one in every if one.quota not in grid), AT_DEGREES: ()},
        shapes={},
        choose=("a",),
        judge=("b",),
        grid=grid,
    )
    figures = {figure.name: figure for figure in judge_surfaces(truth)}
    assert set(figures) == set(surface_names())
    judged = [one for one in every if one.module == "b" and one.quota not in grid]
    assert figures[f"{AT_QUOTAS}, {SHAPED}"].labels["num_samples"] == str(len(judged))
    assert figures[f"{AT_QUOTAS}, {CHOSEN}"].value < 0.05
    assert figures[f"{AT_DEGREES}, {SHAPED}"].reason
    assert set(curves_of(every)) == {("a", Phase.FORWARD), ("b", Phase.FORWARD)}
    assert max(FEW_QUOTAS) < 16


def test_later_measurements_begin_when_the_fitted_ones_have_ended():
    ground = Ground(bench_of(), TINY)
    later, fitted = ground.later, ground.profile
    assert fitted.environment.created <= later.environment.created
    assert {s.degree for s in later.samples} - {s.degree for s in fitted.samples} == {4}
