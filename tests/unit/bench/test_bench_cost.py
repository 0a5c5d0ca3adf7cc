"""``bench_cost``: every figure by name, nothing that judges was fitted, and what cannot be had says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cost import __main__ as bench_cost
from bench.cost import study as cost_study
from bench.cost.figures import COUNTS, FORM_WORDS, GOALS, TRIED, error_name, judged, mean_figure, verdict
from bench.cost.ground import TINY, Ground
from bench.cost.groups import key, split_runs
from bench.cost.study import EVERY_NAME, MEASURED, SURFACE, CostStudy
from bench.cost.surface import surface_errors
from bench.gpu.bench import Bench
from bench.record import Study
from mosaic import artifact
from mosaic.backends.host.backend import HostBackend
from mosaic.device import Device
from mosaic.microbench import Budget
from mosaic.profile import Phase, Sample


class Known:
    """Bandwidths that grow with the quota."""

    def bandwidth(self, module, phase, degree, quota):
        return min(1.0, (0.02 + 0.01 * (ord(module[0]) % 7)) * quota)


def bench_of(num_slots=2, seconds=60.0):
    return Bench(backend=HostBackend(num_slots), budget=Budget(seconds), dry_run=True)


def device_of(num_slots):
    return Device(name="made-up", kind="cuda", num_slots=num_slots)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One run of the whole study at its smallest; two cores are made of whatever is here."""
    path = tmp_path_factory.mktemp("study") / "study.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_cost, "HostBackend", lambda: HostBackend(2))
        made = bench_cost.study(TINY, seconds=3.0, path=path)
    return made, path


def test_every_figure_is_written_once_by_name_and_can_be_read(written):
    made, path = written
    assert artifact.load(Study, path) == made
    assert sorted(figure.name for figure in made.figures) == sorted(EVERY_NAME)
    assert {figure.source for figure in made.figures} == {"measured", "simulated"}


def test_a_figure_without_a_number_has_a_reason_and_one_with_a_number_its_samples(written):
    for figure in written[0].figures:
        if figure.value is None:
            assert figure.reason, figure.name
            assert figure.labels.get("verdict") in (None, "not measured", "not met")
        else:
            assert figure.samples, figure.name


def test_more_modules_than_cores_are_absent_and_simulated_in_figures_of_their_own(written):
    figures = {figure.name: figure for figure in written[0].figures}
    for count in COUNTS[1:]:
        for form in FORM_WORDS:
            measured = figures[error_name(count, form)]
            assert (measured.value, measured.reason) == (None, "this machine has 2 cores")
            assert figures[error_name(count, form, rule="max-min")].source == "simulated"
    for figure in figures.values():
        assert (figure.source == "simulated") == figure.name.startswith("simulated")


def test_without_time_every_figure_is_named_and_a_part_that_fails_costs_its_own_only(monkeypatch):
    def fail(ground):
        raise RuntimeError("the fan fell off")

    monkeypatch.setattr(cost_study, "measure_surface", fail)
    figures = list(CostStudy(bench_of(seconds=0.0), TINY).run(simulated=False))
    failed = [figure for figure in figures if "the fan fell off" in figure.reason]
    assert [figure.name for figure in failed] == list(SURFACE)
    assert sorted(figure.name for figure in figures) == sorted(MEASURED)
    assert all(figure.reason for figure in figures if figure.value is None)


@pytest.mark.parametrize(("num_slots", "num_modules"), [(2, 4), (2, 8), (16, 8)])
def test_no_run_is_both_fitted_and_held_out(num_slots, num_modules):
    names = "abcdefgh"[:num_modules]
    fit, by_count = split_runs(names, Known(), device_of(num_slots), num_fit=8, num_held=10, counts=COUNTS)
    held = [key(run) for runs in by_count.values() for run in runs]
    assert not {key(run) for run in fit} & set(held)
    assert len(set(held)) == len(held)
    for count, runs in by_count.items():
        assert bool(runs) == (count <= min(num_slots, num_modules))
        assert all(len(run.modules) == count and sum(run.quotas) <= num_slots for run in runs)


def test_a_point_in_both_is_refused():
    samples = [Sample(module="m", phase=Phase.FORWARD, quota=q, times_ms=(1.0 / q,)) for q in (1, 2, 4)]
    with pytest.raises(ValueError, match="1 points are fitted and held out"):
        surface_errors(samples, samples[:1])
    held = Sample(module="m", phase=Phase.FORWARD, quota=3, times_ms=(1 / 3,))
    assert surface_errors(samples, [held]) == [pytest.approx(0, abs=1e-9)]


def test_later_measurements_begin_when_the_fitted_ones_have_ended():
    ground = Ground(bench_of(), TINY)
    later, fitted = ground.later, ground.profile
    assert fitted.environment.created <= later.environment.created
    assert {s.degree for s in later.samples} - {s.degree for s in fitted.samples} == {4}


def test_a_goal_is_met_only_by_a_number():
    name = next(iter(GOALS))
    good = mean_figure(name, [0.01, 0.02], source="measured")
    assert verdict(good) == "met"
    assert verdict(replace(good, value=0.5)) == "not met"
    missing = mean_figure(name, [], source="measured", reason="no GPU")
    assert (verdict(missing), missing.reason) == ("not measured", "no GPU")
    assert verdict(replace(missing, labels={TRIED: "all"})) == "not met"
    assert judged(missing).labels["verdict"] == "not measured"
    assert verdict(replace(good, name="something else")) == ""
