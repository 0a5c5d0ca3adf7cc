"""Pictures of pipeline schedules: what lies where, and what is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning_cases import one_f_one_b, run_in_order

from mosaic.graph import Part
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.rank_memory import rank_timelines
from mosaic.pipelining.tasks import Task, TaskGraph, Timed
from mosaic.pipelining.tuning.pairs import with_candidates
from mosaic.report.pipeline_picture import PipelineRun, draw_pipelines, pipelines_canvas

VIT, LLM = Part(module="vit"), Part(module="llm")


def task(row: int, kind: ActionKind, *parts: Part, ms: int = 2, takes: int = 0, frees: int = 0) -> Task:
    return Task(
        row=row,
        kind=kind,
        parts=parts,
        microbatch=0,
        time_ns=ms * 10**6,
        takes_bytes=takes * 10**9,
        frees_bytes=frees * 10**9,
    )


SMALL = PipelineRun(
    title="small",
    graph=TaskGraph(
        tasks=(
            task(0, ActionKind.FORWARD, VIT, LLM, takes=3),
            task(1, ActionKind.FORWARD, LLM),
            task(1, ActionKind.BACKWARD, LLM),
            task(1, ActionKind.WEIGHTS, LLM, ms=1),
            task(0, ActionKind.BACKWARD, VIT, LLM, frees=3),
        ),
        waits=(),
        rank_of=(0, 1),
        base_bytes=(10**9, 10**9),
        limit_bytes=(3 * 10**9, 3 * 10**9),
    ),
    start_ns=[at * 10**6 for at in (0, 2, 4, 7, 6)],
)


def found(canvas: Any, panel: int = 0) -> dict[str, list[tuple[float, float, float, float]]]:
    """By gid: least and most time, least and most height, of all that was drawn under it."""
    boxes: dict[str, list[tuple[float, float, float, float]]] = {}
    for drawn in canvas.figure.axes[panel].collections:
        for path in drawn.get_paths():
            (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            boxes.setdefault(drawn.get_gid(), []).append((left, right, low, high))
    return boxes


def texts(canvas: Any) -> str:
    return "\n".join(t.get_text() for t in (*canvas.figure.texts, *(t for a in canvas.figure.axes for t in a.texts)))


def test_tasks_lie_in_their_ranks_row_with_the_shade_of_their_phase_and_mixed_modules_share_the_height() -> None:
    canvas = pipelines_canvas([SMALL])
    boxes = found(canvas)
    ((left, right, low, high),) = boxes["small/1/llm/B"]
    assert (left, right) == (4, 6)
    assert 1 < low < high < 2
    ((_, _, top, middle),) = boxes["small/0/vit/F"]
    ((_, _, again, bottom),) = boxes["small/0/llm/F"]
    assert middle == pytest.approx(again)
    assert 0 < top < middle < bottom < 1
    shades = {one.get_gid(): one.get_facecolor()[0][:3].sum() for one in canvas.figure.axes[0].collections}
    assert shades["small/1/llm/F"] < shades["small/1/llm/B"] < shades["small/1/llm/W"]
    assert "lightest: for weights" in texts(canvas)


def test_memory_lies_under_its_rank_and_what_is_over_the_limit_is_marked_there_only() -> None:
    canvas = pipelines_canvas([SMALL])
    boxes = found(canvas)
    ((left, right, low, high),) = boxes["small/0/over"]
    assert (left, right) == (0, 8)
    assert max(box[3] for box in boxes["small/0/vit/F"]) < low < high < 1
    assert "small/1/over" not in boxes
    ((_, _, low, high),) = boxes["small/1/memory"]
    assert 1 < low < high < 2
    assert "4 of 3 GB" in texts(canvas)
    assert "1 of 3 GB" in texts(canvas)


def test_a_page_compares_all_runs_with_the_first_on_one_axis_and_says_that_they_are_simulated() -> None:
    slow = replace(SMALL, title="slow", start_ns=[2 * at for at in SMALL.start_ns])
    canvas = pipelines_canvas([slow, SMALL], subtitle="a node")
    said = texts(canvas)
    assert "(simulated)" in said
    assert "a node" in said
    assert "8 ms, 43.8% bubbles; 1.88× as fast as slow" in said
    first, second = canvas.figure.axes[:2]
    assert first.get_xlim() == second.get_xlim()


def test_runs_without_memory_lanes_and_a_step_of_nothing_are_drawn() -> None:
    bare = replace(
        SMALL.graph,
        base_bytes=(),
        limit_bytes=(),
        rank_of=(0, 0),
        tasks=tuple(replace(one, takes_bytes=0, frees_bytes=0) for one in SMALL.graph.tasks),
    )
    canvas = pipelines_canvas([replace(SMALL, graph=bare)])
    assert not [gid for gid in found(canvas) if "memory" in gid]
    (above,), (below,) = found(canvas)["small/0/vit/F"], found(canvas)["small/1/llm/F"]
    assert above[3] < below[2] < below[3] < 1  # two lanes of rank 0
    empty = PipelineRun(title="empty", graph=TaskGraph(tasks=(), waits=(), rank_of=(0,)), start_ns=[])
    assert "nothing runs" in texts(pipelines_canvas([empty]))


def test_a_step_of_many_tasks_is_drawn_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    graph, pairs, orders = one_f_one_b(8, [1.0, 0.5] * 12)
    kept = with_candidates(graph, pairs, [0] * len(pairs))
    timed = run_in_order(kept, orders)
    assert isinstance(timed, Timed)
    run = PipelineRun(title="1F1B", graph=kept, start_ns=timed.start_ns)
    for name in ("a.svg", "b.svg"):
        draw_pipelines([run], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_memory_in_use_follows_what_tasks_take_and_free() -> None:
    ms = 10**6
    first, second = rank_timelines(SMALL.graph, SMALL.start_ns)
    assert [first.bytes_at(at) for at in (0, 8 * ms)] == [4 * 10**9, 10**9]
    assert set(second.in_use_bytes) == {10**9}


def test_no_runs_and_missing_starts_and_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs"):
        pipelines_canvas([])
    with pytest.raises(ValueError, match="'small' has 1 starts of 5 tasks"):
        pipelines_canvas([replace(SMALL, start_ns=[0])])
    with pytest.raises(ValueError, match="gif"):
        draw_pipelines([SMALL], tmp_path / "a.gif")
