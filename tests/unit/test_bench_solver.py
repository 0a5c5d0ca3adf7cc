"""The solver study at sizes that take a moment: every figure has a name, a source, samples, or a reason."""

from __future__ import annotations

import pytest

from bench import bench_solver, solver_gains, solver_paper, solver_pictures, solver_proofs
from bench.record import Study
from bench.solver_runs import figure, search
from mosaic.artifact import load
from mosaic.solver.generate import Recipe, generate


def test_a_search_gives_cost_bound_and_gap():
    found = search(generate(Recipe(shape="multi", num_modules=6, num_devices=2)), seconds=20)
    assert found.is_proven
    assert found.gap == pytest.approx(0, abs=1e-9)
    assert 0 < found.bound_ms <= found.cost_ms


def test_a_figure_without_samples_has_no_number_and_a_reason():
    empty = figure("x, s", [], "measured")
    assert (empty.value, empty.samples) == (None, ())
    assert empty.reason
    missed = figure("x, s", [1.0], "measured", reason="most were late")
    assert missed.value is None
    assert missed.samples == (1.0,)


def test_a_figure_says_how_many_samples_it_has():
    made = figure("x, s", [1.0, 3.0, 2.0], "measured", paper="15.87 s")
    assert made.value == 2.0
    assert made.labels == {"samples": "3", "paper": "15.87 s"}


def test_sixty_four_modules_that_are_never_near_have_a_reason_in_place_of_a_time():
    time_to, gap, share = solver_proofs.sixty_four_modules(seeds=1, limits=(0.0,))
    assert time_to.value is None
    assert "not within 2 %" in time_to.reason
    assert gap.value > 2
    assert share.value == 0


def test_gains_are_at_least_one_over_algorithm_1():
    made = solver_gains.model("ImageBind", num_devices=2)
    found = solver_gains.ratios(made, seconds=20)
    assert set(found) == set(solver_gains.RIVALS)
    assert found["gahc"] >= 1 - 1e-6


def test_the_study_names_every_figure_and_goes_on_after_a_part_that_fails(tmp_path):
    def fails():
        raise RuntimeError("no luck")

    path = tmp_path / "solver.json"
    parts = (
        ("Fig. 13", lambda: solver_paper.figure_13(sizes=(3,), seconds=5)),
        ("broken", fails),
        ("Fig. 14b", lambda: solver_paper.figure_14b(num_modules=3, seconds=1)),
    )
    bench_solver.study(parts, path=path)
    study = load(Study, path)
    names = [one.name for one in study.figures]
    assert len(set(names)) == len(names)
    broken = next(one for one in study.figures if one.name == "broken")
    assert broken.value is None
    assert "no luck" in broken.reason
    assert all(one.source in ("measured", "simulated") for one in study.figures)
    assert all(one.reason for one in study.figures if one.value is None)
    files = solver_pictures.draw(study, tmp_path)
    assert len(files) == 5
    assert all(file.stat().st_size > 1000 for file in files)


def test_both_studies_have_the_same_parts():
    assert [name for name, _ in bench_solver.QUICK] == [name for name, _ in bench_solver.FULL]
