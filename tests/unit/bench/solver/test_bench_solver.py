"""The solver study at sizes that take a moment: every figure has a name, a source, samples, or a reason."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from bench import bounded
from bench.record import Study
from bench.solver import __main__ as bench_solver
from bench.solver import study
from bench.study_parts import StudyPart
from mosaic.artifact import load


def test_the_study_names_every_figure_and_goes_on_after_a_part_that_fails(tmp_path):
    def fails():
        raise RuntimeError("no luck")

    path = tmp_path / "solver.json"
    parts = (
        StudyPart.alone("gains", 60, lambda: study.gains(seeds=1, num_modules=3, seconds=1)),
        StudyPart.alone("broken", 60, fails),
        StudyPart.alone("held", 60, lambda: study.held_memory(seeds=1, sizes=(4,), seconds=5)),
    )
    bench_solver.STUDY.run(parts, path=path)
    made = load(Study, path)
    names = [one.name for one in made.figures]
    assert len(set(names)) == len(names)
    assert "no luck" in next(one.reason for one in made.figures if one.name.startswith("broken"))
    assert all(one.reason for one in made.figures if one.value is None)
    gains = [one for one in made.figures if one.name.startswith("gain of exact over gahc")]
    assert gains
    assert all(one.value >= 1 - 1e-6 for one in gains)
    (lost,) = [one for one in made.figures if one.name.endswith("what it costs, mean, %")]
    assert lost.value >= -1e-6
    assert sum("NOT reached" in line for line in study.goals_table(made.figures)) == len(study.GOALS)


def test_figures_of_the_paper_have_its_values_beside_them():
    made = [*study.search_times(sizes=(3,), seeds=1, seconds=5), *study.granularity(num_modules=3, seeds=1, seconds=1)]
    assert all(one.value is not None for one in made)
    assert any(one.labels.get("paper") for one in made)


def test_ten_modules_are_proven_at_once():
    share, *_ = study.ten_modules(seeds=1, seconds=10, disturbed=False)
    assert share.value == 1


def test_a_part_that_takes_too_long_is_ended_and_keeps_what_it_has_made():
    def slow():
        yield study.figure("soon", [1.0], "measured")
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
