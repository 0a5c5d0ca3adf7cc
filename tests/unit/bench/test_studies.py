"""Each study at a size that takes a moment: its figures by name, and parts that fail or take too long."""

from __future__ import annotations

import multiprocessing
import threading
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

import mosaic
from bench import colocate, never_slower
from bench.context import balance
from bench.context.__main__ import packed_blocks
from bench.harness import StudyPart
from bench.loops import Workload
from bench.pipeline.measured.steps import Sizes, steps
from bench.processes import PartFailedError, within
from bench.ranks.launch import on_ranks
from bench.ranks.links import links
from bench.ranks.simulated import scaling
from bench.record import Figure, Study
from bench.solver import study
from bench.solver.__main__ import STUDY
from mosaic.artifact import load
from mosaic.cli.workload import load_workload
from mosaic.profiler import ProfileSettings


def test_calls_have_figures_of_their_own():
    values = {figure.name: figure.value for figure in colocate.calls(100)}
    assert len(values) == 4
    assert all(values.values())


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def test_a_model_that_is_never_slower_has_all_its_figures_with_the_plan_and_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")  # put back after the test
    work = Workload(model=Sides(), batch={"x": torch.randn(4, 8)}, loss=lambda result: result.square().mean())
    options = mosaic.Options(profiling=ProfileSettings(sample_seconds=0.01, foreign_share=2.0))
    figures = never_slower.measure("sides", lambda: work, rounds=3, seconds=0.0, options=options)
    by_name = {figure.name.removeprefix("sides: "): figure for figure in figures}
    columns = (never_slower.AGAIN, never_slower.PLAIN_MS, never_slower.LOST_MS, never_slower.LOST_STEPS)
    assert {never_slower.RATIO, *columns, never_slower.REPAID} <= set(by_name)
    labels = by_name[never_slower.RATIO].labels
    assert labels["runs"] == "the plain loop" or "left" in labels["runs"]
    assert labels["decided"]
    assert all((figure.value is None) == bool(figure.reason) for figure in by_name.values())


def test_planners_are_compared_and_a_part_that_fails_ends_no_other(tmp_path: Path):
    def fails():
        raise RuntimeError("no luck")

    path = tmp_path / "solver.json"
    parts = (
        StudyPart.alone("gains", 60, lambda: study.gains(seeds=1, num_modules=3, seconds=1)),
        StudyPart.alone("broken", 60, fails),
        StudyPart.alone("ten", 60, lambda: study.ten_modules(seeds=1, seconds=10)),
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


def test_a_part_that_takes_too_long_or_dies_keeps_what_it_has_made():
    def slow():
        yield Figure(name="soon", source="measured", value=1.0)
        threading.Event().wait()

    def dies():
        yield Figure(name="soon", source="measured", value=1.0)
        import os

        os.kill(os.getpid(), 9)

    for make, says, status in ((slow, r"did not end within 0\.5 s", "timed out"), (dies, "SIGKILL", "killed")):
        figures = []
        with pytest.raises(PartFailedError, match=says) as raised:
            figures.extend(within(make, 0.5 if make is slow else 60))
        assert raised.value.status == status
    part = within(slow, 5)
    assert next(part).name == "soon"
    part.close()
    assert not multiprocessing.active_children()


def test_a_sequence_is_planned_in_time_and_ranks_come_out_even():
    figures = chain(
        balance.planning("mp", 2048, (2,)),
        balance.balance("ee", 4096, 4, 2),
        balance.received("mp of ~1k, 16384 tokens", lambda seed: packed_blocks(16384, 1024, seed), 4, 1),
    )
    values = {figure.name: figure.value for figure in figures}
    assert values["ee, 4096 tokens, 4 ranks: lpt: most tiles over mean"] < 1.05
    timed = [value for name, value in values.items() if name.endswith(", ms")]
    assert len(timed) == 4
    assert all(value > 0 for value in timed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks a process whose autograd may have threads of the GPU")
def test_a_chain_is_run_by_all_schedules_with_the_same_losses():
    sizes = Sizes(width=64, layers=2, microbatches=2, steps=1, rounds=1, plan_s=0.0)
    figures = {figure.name: figure for figure in on_ranks(partial(steps, name="llama", sizes=sizes), 2, 100)}
    for name in ("1f1b", "gpipe"):
        ratio = figures[f"llama, 2 ranks: {name}: step over the planned one's, ratio"]
        assert ratio.value is not None, ratio.reason
        assert ratio.value > 0
    assert len(figures["llama, 2 ranks: planned: step, ms"].samples) == 1


def test_rows_between_two_ranks_are_measured_and_predicted():
    sources = {figure.name: figure.source for figure in on_ranks(links, 2, 120)}
    assert sources["rows of 64 KiB from 2 ranks to one, ms"] == "measured"
    assert sources["rows of 64 KiB from 2 ranks to one, predicted, ms"] == "predicted"


def test_planners_steps_stand_over_that_of_auto():
    figures = {one.name: one for one in scaling(model="clip-tiny", num_devices=(2,), seconds=0.2, figure="Fig. 9")}
    assert figures["auto: step over auto's, clip-tiny, 2 GPUs, ratio"].value == 1
    assert figures["distmm: step over auto's, clip-tiny, 2 GPUs, ratio"].labels["paper"] == "1.10 to 1.42"


def test_a_model_of_the_zoo_has_the_tasks_of_its_name() -> None:
    meta = torch.device("meta")
    tasks = "image_text,image_audio"
    assert list(load_workload(f"zoo:multitask-clip-tiny:2:{tasks}", device=meta).sample) == tasks.split(",")
    with pytest.raises(ValueError, match="unknown task 'driving'; choose from: image_text"):
        load_workload("zoo:multitask-clip-tiny:2:driving", device=meta)
