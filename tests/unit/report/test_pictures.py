"""Pictures, tables and traces of timelines, plans and pipelines: positions, texts and files."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mosaic.artifact import load, save
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.graph import Part
from mosaic.pipelining.tasks import ActionKind, Task, TaskGraph
from mosaic.plan import Grid, Placement, Plan, SearchRecord, TemporalStage
from mosaic.report.figure import save_figure
from mosaic.report.pipeline_picture import PipelineRun, pipelines_figure
from mosaic.report.plan_view import plan_figure, plan_table
from mosaic.report.timeline import choose_steps, timeline_figure, write_trace
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
        TemporalStage(placements=(placement("image", (0, 1, 2), 5, (0, 1)), placement("audio", (3,), 3))),
        TemporalStage(placements=(placement("head", (0, 1, 2, 3), 4),)),
    ),
    graph="g",
    sequential_ms=26,
    search=SearchRecord(method="manual"),
)


def test_bars_lie_in_their_lanes_and_each_timeline_starts_at_zero() -> None:
    figure = timeline_figure([PLAIN, COLOCATED], plan=PLAN)
    ((left, low, width, height),) = boxes(figure, 1)["audio/forward/0"]
    assert (left, width) == (2, 13)
    assert 1 < low < low + height < 2
    ((left, low, width, height),) = boxes(figure, 0)["image/backward/0"]
    assert (left, width) == (11, 19)
    assert low < 1 < low + height
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    for words in ("step 0: 30 ms", "the plan predicted 13 ms per step", "(not measured)"):
        assert words in texts(figure)
    assert "nothing was recorded" in texts(timeline_figure([COLOCATED, timeline()]))


def test_only_whole_typical_steps_are_drawn() -> None:
    pairs = ((number, phase) for number in range(4) for phase in ("forward", "backward"))
    whole = [span("image", phase, (0,), index, index + 1, step) for index, (step, phase) in enumerate(pairs)]
    run = timeline(*whole, span("image", "forward", (0,), 8, 9, 4))
    assert list(choose_steps(run, 2)) == [2, 3]
    assert set(boxes(timeline_figure([run], num_steps=1))) == {"image/forward/3", "image/backward/3"}
    lengths = (10, 11, 12, 13, 1800)
    run = timeline(*(span("image", "forward", (0,), 100 * i, 100 * i + n, i) for i, n in enumerate(lengths)))
    assert list(choose_steps(run, 1)) == [2]
    starts = (0, 10, 20, 900, 910)
    run = timeline(*(span("image", "forward", (0,), at, at + 9, i) for i, at in enumerate(starts)))
    assert list(choose_steps(run, 2)) == [3, 4]  # not across the pause
    assert "1 of 5 steps, nearest to the median" in texts(timeline_figure([run], num_steps=1))


def test_what_cannot_be_drawn_or_written_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"use \.png or \.svg"):
        save_figure(timeline_figure([PLAIN]), tmp_path / "a.jpg")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(MosaicError, match=r"cannot write .*a\.png"):
        save_figure(timeline_figure([PLAIN]), tmp_path / "file" / "a.png")
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MosaicError, match=r"pip install 'mosaic-colocate\[plot\]'"):
        save_figure(timeline_figure([PLAIN]), tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def complete(*timelines: Timeline) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        write_trace(timelines, path := Path(folder) / "trace.json")
        return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_a_span_becomes_a_complete_event_in_microseconds_from_the_runs_start() -> None:
    audio = next(event for event in complete(PLAIN, COLOCATED) if event["name"] == "audio forward")
    assert (audio["ts"], audio["dur"], audio["pid"]) == (2000.0, 13000.0, 2)
    assert audio["args"] == {"module": "audio", "phase": "forward", "slots": [1], "step": 0}


def test_events_of_one_thread_never_overlap() -> None:
    crossing = [span(name, "forward", (0,), *times) for name, *times in (("a", 0, 2), ("b", 1, 3), ("c", 2, 4))]
    events = [event for event in complete(timeline(*crossing)) if event["cat"] == "forward"]
    assert len(events) == 3
    for thread in {event["tid"] for event in events}:
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread)
        assert all(first[1] <= second[0] for first, second in pairwise(row))


def test_a_plan_of_a_busy_machine_says_so_in_its_file_its_picture_and_its_table(tmp_path: Path) -> None:
    note = "while its modules were measured, other processes used 61% of the CPU"
    save(replace(PLAN, foreign_cpu_share=0.61, device=replace(PLAN.device, kind="host")), tmp_path / "plan.json")
    plan = load(Plan, tmp_path / "plan.json")
    assert note in texts(plan_figure(plan))
    assert note in str(plan_table(plan).caption)
    assert "slot time in use: 68%, modelled" in str(plan_table(PLAN).caption)
    assert "68% of slot time in use (modelled)" in texts(plan_figure(PLAN))
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


def test_pipelines_are_compared_on_one_axis() -> None:
    slow = replace(SMALL, title="slow", start_ns=[2 * at for at in SMALL.start_ns])
    figure = pipelines_figure([slow, SMALL])
    for words in ("(simulated)", "8 ms, 43.8% bubbles; 1.88× as fast as slow"):
        assert words in texts(figure)
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


@pytest.mark.parametrize(
    ("slot", "start", "end", "overlap"), [(1, 5, 15, 0.5), (1, 0, 10, 1.0), (1, 10, 20, 0.0), (0, 5, 15, 0.0)]
)
def test_overlap_counts_lane_time_with_another_lane_busy(slot: int, start: int, end: int, overlap: float) -> None:
    run = timeline(span("a", "forward", (0,), 0, 10), span("b", "forward", (slot,), start, end))
    assert run.overlap == pytest.approx(overlap)
    assert timeline().overlap == 0
