"""Pictures of timelines, plans, pipelines and sequences: positions, texts and files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mosaic.artifact import load, save
from mosaic.context import causal, packed, plan_context
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.graph import Part
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.tasks import Task, TaskGraph
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.report.charts import Bar, Line, Words, draw_bars, draw_lines, draw_matrix
from mosaic.report.context_picture import context_figure, draw_context
from mosaic.report.pipeline_picture import PipelineRun, draw_pipelines, pipelines_figure
from mosaic.report.plan_picture import draw_plan, plan_figure
from mosaic.report.table import plan_table
from mosaic.report.timeline import choose_steps, draw_timelines, timeline_figure
from mosaic.timeline import Span, Timeline


def span(module: str, phase: Any, slots: tuple[int, ...], start: float, end: float, step: int = 0) -> Span:
    return Span(module=module, phase=phase, slots=slots, step=step, start_ms=start, end_ms=end)


def timeline(*spans: Span, title: str = "colocated", num_slots: int = 2) -> Timeline:
    return Timeline(title=title, num_slots=num_slots, spans=spans)


PLAIN = timeline(
    span("image", "forward", (0, 1), 0, 10),
    span("loss", "glue", (0, 1), 10, 11),
    span("image", "backward", (0, 1), 11, 30),
    title="plain",
)
COLOCATED = timeline(span("image", "forward", (0,), 100, 110), span("audio", "forward", (1,), 102, 115))


def boxes(figure: Any, panel: int = 0) -> dict[str, list[tuple[float, float, float, float]]]:
    """Rectangles by gid, as (left, low, width, height)."""
    by_gid: dict[str, list[tuple[float, float, float, float]]] = {}
    for patch in figure.axes[panel].patches:
        if patch.get_gid():
            box = (patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height())
            by_gid.setdefault(patch.get_gid(), []).append(box)
    return by_gid


def texts(figure: Any) -> str:
    import matplotlib.text

    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def placement(module: str, slots: tuple[int, ...], forward: float, devices: tuple[int, ...] = (0,)) -> Placement:
    return Placement(
        part=Part(module=module), slots=slots, grid=Grid(ranks=devices), forward_ms=forward, backward_ms=2.0
    )


PLAN = Plan(
    device=Device(name="GPU", kind="cuda", num_slots=4),
    num_devices=2,
    stages=(
        Stage(placements=(placement("image", (0, 1, 2), 5, (0, 1)), placement("audio", (3,), 3))),
        Stage(placements=(placement("head", (0, 1, 2, 3), 4),)),
    ),
    graph="g",
    sequential_ms=26,
    search=SearchRecord(method="manual"),
)


def test_a_picture_has_the_same_bytes_each_time_and_leaves_the_users_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    for name in ("a.svg", "b.svg"):
        draw_timelines([PLAIN], tmp_path / name)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_bars_lie_in_their_lanes_and_each_timeline_starts_at_zero() -> None:
    figure = timeline_figure([PLAIN, COLOCATED], plan=PLAN)
    ((left, low, width, height),) = boxes(figure, 1)["audio/forward/0"]
    assert (left, width) == (2, 13)
    assert 1 < low < low + height < 2
    ((left, low, width, height),) = boxes(figure, 0)["image/backward/0"]
    assert (left, width) == (11, 19)
    assert low < 1 < low + height
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    said = texts(figure)
    for words in ("step 0: 30 ms", "the plan predicted 13 ms a step", "(not measured)"):
        assert words in said
    assert "nothing was recorded" in texts(timeline_figure([COLOCATED, timeline()]))


@pytest.mark.filterwarnings("error")
def test_any_name_is_drawn_as_it_is(tmp_path: Path) -> None:
    run = timeline(span("_private$x$", "forward", (0,), 0, 5), span("a" * 300, "forward", (1,), 0, 5), title="$\\frac")
    draw_timelines([run], tmp_path / "a.png", subtitle="b" * 500)
    assert "_private$x$" in texts(timeline_figure([run]))


def test_only_whole_steps_are_drawn_the_last_or_the_typical_ones() -> None:
    pairs = ((number, phase) for number in range(4) for phase in ("forward", "backward"))
    whole = [span("image", phase, (0,), index, index + 1, step) for index, (step, phase) in enumerate(pairs)]
    run = timeline(*whole, span("image", "forward", (0,), 8, 9, 4))
    assert list(choose_steps(run, 2)) == [2, 3]
    assert set(boxes(timeline_figure([run], num_steps=1))) == {"image/forward/3", "image/backward/3"}
    lengths = (10, 11, 12, 13, 1800)
    run = timeline(*(span("image", "forward", (0,), 100 * i, 100 * i + n, i) for i, n in enumerate(lengths)))
    assert list(choose_steps(run, 1, "typical")) == [2]
    assert "1 of 5 steps, nearest to their median" in texts(timeline_figure([run], num_steps=1, choice="typical"))


def test_what_cannot_be_drawn_or_written_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="0 timelines"):
        draw_timelines([], tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"use \.png or \.svg"):
        draw_timelines([PLAIN], tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="there are no plans to draw"):
        draw_context([], tmp_path / "a.png")
    with pytest.raises(ValueError, match="no runs"):
        draw_pipelines([], tmp_path / "a.png")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(MosaicError, match=r"cannot write .*a\.png"):
        draw_timelines([PLAIN], tmp_path / "file" / "a.png")
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MosaicError, match=r"pip install 'mosaic-colocate\[plot\]'"):
        draw_timelines([PLAIN], tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_planned_module_is_as_tall_as_its_quota_on_each_of_its_devices(tmp_path: Path) -> None:
    figure = plan_figure(PLAN)
    by_gid = boxes(figure)
    assert by_gid["image/forward/0"] == [(0, 0, 5, 0.75)]
    assert by_gid["image/forward/1"] == [(0, 1.12, 5, 0.75)]
    assert by_gid["audio/forward/0"] == [(0, 0.75, 3, 0.25)]
    # Backwards follow all forwards, in reverse order.
    assert [by_gid[f"{name}/0"][0][0] for name in ("head/forward", "head/backward", "image/backward")] == [5, 9, 11]
    assert "(predicted)" in texts(figure)
    assert "predicted speed-up 2.00×" in texts(figure)
    stages = tuple(Stage(placements=(placement(name, (0, 1, 2, 3), 9),)) for name in ("image", "audio", "head"))
    sequential = Plan(device=PLAN.device, stages=stages, graph="g", search=SearchRecord(method="sequential"))
    first, second = plan_figure(PLAN, sequential=sequential).axes[:2]
    assert first.get_xlim() == second.get_xlim()
    draw_plan(PLAN, tmp_path / "plan.png", sequential=sequential)
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_plan_of_a_busy_machine_says_so_in_its_file_its_picture_and_its_table(tmp_path: Path) -> None:
    note = "while its modules were measured, other processes used 61% of the CPU"
    save(replace(PLAN, foreign_cpu_share=0.61, device=replace(PLAN.device, kind="host")), tmp_path / "plan.json")
    plan = load(Plan, tmp_path / "plan.json")
    assert note in texts(plan_figure(plan))
    assert note in str(plan_table(plan).caption)
    assert "while its modules" not in texts(plan_figure(PLAN)) + str(plan_table(PLAN).caption)


def task(row: int, kind: ActionKind, *names: str, ms: int = 2, takes: int = 0, frees: int = 0) -> Task:
    return Task(
        row=row,
        kind=kind,
        parts=tuple(Part(module=name) for name in names),
        microbatch=0,
        time_ns=ms * 10**6,
        takes_bytes=takes * 10**9,
        frees_bytes=frees * 10**9,
    )


SMALL = PipelineRun(
    title="small",
    graph=TaskGraph(
        tasks=(
            task(0, ActionKind.FORWARD, "vit", "llm", takes=3),
            task(1, ActionKind.FORWARD, "llm"),
            task(1, ActionKind.BACKWARD, "llm"),
            task(1, ActionKind.WEIGHTS, "llm", ms=1),
            task(0, ActionKind.BACKWARD, "vit", "llm", frees=3),
        ),
        waits=(),
        rank_of=(0, 1),
        base_bytes=(10**9, 10**9),
        limit_bytes=(3 * 10**9, 3 * 10**9),
    ),
    start_ns=[at * 10**6 for at in (0, 2, 4, 7, 6)],
)


def test_tasks_lie_in_their_ranks_row_and_mixed_modules_share_its_height() -> None:
    figure = pipelines_figure([SMALL])
    by_gid = boxes(figure)
    ((left, low, width, height),) = by_gid["small/1/llm/B"]
    assert (left, width) == (4, 2)
    assert 1 < low < low + height < 2
    ((_, top, _, height),), ((_, below, _, _),) = by_gid["small/0/vit/F"], by_gid["small/0/llm/F"]
    assert 0 < top < top + height == pytest.approx(below)
    assert "lightest: for weights" in texts(figure)


def test_memory_lies_under_its_rank_and_only_excess_over_the_limit_is_marked() -> None:
    assert SMALL.memory_of(0) == ([0.0, 2.0, 6.0, 8.0], [4e9, 4e9, 4e9, 1e9])
    figure = pipelines_figure([SMALL])
    gids = {drawn.get_gid() for drawn in figure.axes[0].collections}
    assert {"small/0/over", "small/0/memory", "small/1/memory"} <= gids
    assert "small/1/over" not in gids
    assert "4 of 3 GB" in texts(figure)
    assert "1 of 3 GB" in texts(figure)


def test_pipelines_are_compared_on_one_axis_and_a_step_of_nothing_is_drawn(tmp_path: Path) -> None:
    slow = replace(SMALL, title="slow", start_ns=[2 * at for at in SMALL.start_ns])
    figure = pipelines_figure([slow, SMALL], subtitle="a node")
    for words in ("(simulated)", "a node", "8 ms, 43.8% bubbles; 1.88× as fast as slow"):
        assert words in texts(figure)
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    empty = PipelineRun(title="empty", graph=TaskGraph(tasks=(), waits=(), rank_of=(0,)), start_ns=[])
    assert "nothing runs" in texts(pipelines_figure([empty]))
    with pytest.raises(ValueError, match="'small' has 1 starts of 5 tasks"):
        pipelines_figure([replace(SMALL, start_ns=[0])])


def test_each_visible_pair_has_a_colour_of_its_querys_rank() -> None:
    plan = plan_context(packed([causal(40), causal(30)]), 3, block=8, method="ring")
    figure = context_figure([plan])
    pixels = np.asarray(figure.axes[1].images[0].get_array())
    assert np.array_equal((pixels != 1).any(axis=2), plan.mask.dense())


def test_long_sequences_are_drawn_by_tiles_and_every_work_bar_is_a_ranks(tmp_path: Path) -> None:
    plan = plan_context(causal(4096), 3)
    figure = context_figure([plan, plan_context(causal(4096), 3, method="headtail")], title="Two ways")
    assert "lighter: tiles seen in part" in texts(figure)
    assert "headtail: rank with most has" in texts(figure)
    bars = context_figure([plan_context(packed([causal(300)], num_tokens=330), 40, block=8)])
    assert [label.get_text() for label in bars.axes[2].get_yticklabels()] == [str(rank) for rank in range(0, 40, 3)]
    for words in ("text", "images", "padding", "ranks' colours repeat"):
        assert words in texts(bars)
    draw_context(plan, tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 5_000


@pytest.mark.filterwarnings("error")
def test_charts_are_drawn_with_and_without_values(tmp_path: Path) -> None:
    words = Words(title="a", subtitle="b", x_axis="slots", y_axis="ms")
    bars = [Bar(name="image", group="g", value=2.0, quartiles=(1.5, 2.5), text="2 ms"), Bar(name="x", text="no GPU")]
    draw_bars(bars, words, tmp_path / "bars.png", level=1.0)
    draw_lines([Line(name="image", points=((1, 2, 1, 3), (2, 1, 1, 1)))], words, tmp_path / "lines.png", level=1.0)
    draw_matrix(["a", "b"], ["a", "b"], {("a", "b"): 1.5, ("b", "a"): 0.9}, words, tmp_path / "matrix.png")
    draw_lines([], words, tmp_path / "none.svg")
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("slot", "start", "end", "overlap"), [(1, 5, 15, 0.5), (1, 0, 10, 1.0), (1, 10, 20, 0.0), (0, 5, 15, 0.0)]
)
def test_overlap_counts_lane_time_with_another_lane_busy(slot: int, start: int, end: int, overlap: float) -> None:
    run = timeline(span("a", "forward", (0,), 0, 10), span("b", "forward", (slot,), start, end))
    assert run.overlap == pytest.approx(overlap)
    assert timeline().overlap == 0
