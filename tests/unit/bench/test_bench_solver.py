"""The solver study at sizes that take a moment, and parts of studies that fail or take too long."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from bench.harness import StudyPart
from bench.processes import PartFailedError, within
from bench.record import Study
from bench.solver import study
from bench.solver.__main__ import STUDY
from mosaic.artifact import load


def test_the_study_names_every_figure_and_goes_on_after_a_part_that_fails(tmp_path):
    def fails():
        raise RuntimeError("no luck")

    path = tmp_path / "solver.json"
    parts = (
        StudyPart.alone("gains", 60, lambda: study.gains(seeds=1, num_modules=3, seconds=1)),
        StudyPart.alone("broken", 60, fails),
        StudyPart.alone("ten", 60, lambda: study.ten_modules(seeds=1, seconds=10, disturbed=False)),
        StudyPart.alone("held", 60, lambda: study.held_memory(seeds=1, sizes=(4,), seconds=5)),
        StudyPart.alone("Fig. 13", 60, lambda: study.search_times(sizes=(3,), seeds=1, seconds=5)),
        StudyPart.alone("Fig. 14b", 60, lambda: study.granularity(num_modules=3, seeds=1, seconds=1)),
    )
    STUDY.run(parts, path=path)
    figures = {figure.name: figure for figure in load(Study, path).figures}
    assert "no luck" in figures["broken: what is missing of it"].reason
    assert all(figure.reason for figure in figures.values() if figure.value is None)
    gains = [figure.value for name, figure in figures.items() if name.startswith("gain of exact over gahc")]
    assert min(gains) >= 1 - 1e-6
    assert figures[f"{study.TEN}: proven optimal within 10 s, share of instances"].value == 1
    assert figures["Fig. 13b: optimality of the Mosaic mapping-solver, 3 modules, median, %"].labels["paper"] == "100"


def test_a_part_that_takes_too_long_is_ended_and_keeps_what_it_has_made():
    def slow():
        yield study.figure("soon", [1.0], "measured")
        threading.Event().wait()

    made = []
    with pytest.raises(PartFailedError, match=r"not done after 0\.5 s"):
        made.extend(within(slow, 0.5))
    one = within(slow, 5)
    assert next(one).name == "soon"
    one.close()
    assert not multiprocessing.active_children()
