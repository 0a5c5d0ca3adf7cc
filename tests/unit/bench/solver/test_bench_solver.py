"""The solver study at sizes that take a moment: every figure has a name, a source, samples, or a reason."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading

import pytest

from bench import bounded
from bench.figures.papers.read import printed
from bench.pages import HIGHLIGHTS
from bench.record import Study
from bench.solver import __main__ as bench_solver
from bench.solver import gains as solver_gains
from bench.solver import goals as solver_goals
from bench.solver import models as solver_models
from bench.solver import paper as solver_paper
from bench.solver import parts as solver_parts
from bench.solver import pictures as solver_pictures
from bench.solver.generate import Recipe, generate
from bench.solver.proofs import ten_modules
from bench.solver.runs import figure, search
from bench.study_parts import StudyPart
from mosaic.artifact import load


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
    assert made.labels == {"samples": "3", "paper": "15.87 s", "p10": "1.2", "p90": "2.8"}


def test_gains_are_at_least_one_over_algorithm_1():
    made = solver_gains.model("ImageBind", num_devices=2)
    found = solver_gains.ratios(made, seconds=20)
    assert set(found) == set(solver_gains.RIVALS)
    assert found["gahc"] >= 1 - 1e-6


def test_the_study_names_every_figure_and_goes_on_after_a_part_that_fails(tmp_path):
    def fails():
        raise RuntimeError("no luck")

    path = tmp_path / "solver.json"

    def part(name, make):
        return StudyPart.alone(name, 60, make)

    parts = (
        part("Fig. 13", lambda: solver_paper.figure_13(sizes=(3,), seeds=2, ablated=1, seconds=5)),
        part("broken", fails),
        part("worth of parts", lambda: solver_parts.worth_of_parts(seeds=1, num_modules=3)),
    )
    bench_solver.STUDY.run(parts, path=path)
    study = load(Study, path)
    names = [one.name for one in study.figures]
    assert len(set(names)) == len(names)
    broken = next(one for one in study.figures if one.name == "broken: what is missing of it")
    assert broken.value is None
    assert "no luck" in broken.reason
    assert all(one.source in ("measured", "simulated") for one in study.figures)
    assert all(one.reason for one in study.figures if one.value is None)
    worth = [one for one in study.figures if one.name.startswith(("lost", "gained"))]
    assert len(worth) == 4 * len(solver_parts.SHAPES)
    assert all(one.value is not None and one.value >= -1e-6 for one in worth if one.name.startswith("lost"))
    files = solver_pictures.draw(study, tmp_path)
    assert len(files) == 6
    assert all(file.stat().st_size > 1000 for file in files)


def test_both_studies_have_the_same_parts():
    assert [part.name for part in bench_solver.QUICK] == [part.name for part in bench_solver.FULL]


def test_a_part_that_takes_too_long_is_ended_and_keeps_what_it_has_made():
    def slow():
        yield figure("soon", [1.0], "measured")
        threading.Event().wait()

    made = []
    with pytest.raises(bounded.PartFailedError, match=r"not done after 0\.5 s"):
        made.extend(bounded.within(slow, 0.5))
    one = bounded.within(slow, 5)
    assert next(one).name == "soon"
    one.close()
    assert not multiprocessing.active_children()


def test_a_part_whose_process_dies_says_so():
    with pytest.raises(bounded.PartFailedError, match="died"):
        list(bounded.within(lambda: os._exit(3), 20))


def test_a_goal_without_a_number_is_not_reached_and_stands_in_the_file():
    worst = figure("10 modules, 8 GPUs, 10 %: search time, worst, s", [0.7], "measured")
    figures = solver_goals.with_missing([worst])
    lines = "\n".join(solver_goals.table(figures))
    assert "search time, worst, s: at most 0.5; 0.7 (NOT reached)" in lines
    assert "search time, median, s: at most 0.001; not had" in lines
    assert lines.count("not had") == len(solver_goals.GOALS) - 1


def test_models_without_rows_in_the_table_are_named_with_the_reason():
    count = len(solver_gains.WITHOUT_ROWS) * len(solver_gains.RIVALS)
    found = list(itertools.islice(solver_gains.gains(seeds=1, num_modules=3, seconds=1), count))
    assert sum("CLIP" in one.name for one in found) == len(solver_gains.RIVALS)
    assert all(one.value is None and "Table 1" in one.reason for one in found)


def test_a_model_of_the_zoo_has_a_gain_over_each_planner_with_its_source():
    found = list(solver_models.gains_of_models(size="tiny", batch=8, num_devices=(1, 2), seconds=5, models=("clip",)))
    assert len(found) == len(solver_gains.RIVALS)
    assert all(one.source == "predicted" for one in found)
    assert all(len(one.samples) == 2 and one.value > 0 for one in found if one.value is not None)
    assert found[0].value >= 1 - 1e-6


def test_holding_memory_never_makes_a_plan_faster():
    held = {one.name.split(": ")[1]: one for one in solver_parts.held_memory(seeds=1, sizes=(4,), seconds=5)}
    assert held["what it costs, mean, %"].value >= -1e-6
    assert 0 <= held["it rules out the best plan, share of instances"].value <= 1
    assert held["step over its bound, worst, %"].value == pytest.approx(0, abs=1e-4)


def test_what_a_plan_is_worth_comes_first_and_each_figure_of_the_paper_once():
    names = [part.name for part in bench_solver.FULL]
    assert names[:2] == ["the six models", "gains"]
    assert [name for name in names if name.startswith("Fig.")] == ["Fig. 13", "Fig. 14a", "Fig. 14b"]
    table = "\n".join(HIGHLIGHTS["bench_solver"])
    assert table.index("gain of exact") < table.index("10 modules, 8 GPUs")


def test_what_the_paper_says_stands_beside_the_same_thing_only():
    made = list(solver_paper.figure_14b(num_modules=3, seeds=2, seconds=1))
    assert all(len(one.samples) == 2 for one in made)
    said = {one.name: one.labels["paper"] for one in made if "paper" in one.labels}
    assert set(said.values()) == set(printed("mosaic", "Fig. 14b").values())
    assert all("gahc" in name for name in said)
    proofs = ten_modules(seeds=1, seconds=0.01, disturbed=False)
    assert not any("paper" in one.labels for one in proofs)
