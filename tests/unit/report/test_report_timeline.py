"""Pictures of timelines and plans: what lies where, what is written, and what is left alone."""

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mosaic.artifact import load, save
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.report.plan_picture import draw_plan, plan_canvas
from mosaic.report.steps import choose_steps
from mosaic.report.table import plan_table
from mosaic.report.timeline import draw_timelines, timeline_canvas
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


def boxes(canvas: Any, panel: int = 0) -> dict[str, list[tuple[float, float, float, float]]]:
    """Rectangles by gid without the plan's or timeline's title, as (left, low, width, height)."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for patch in canvas.figure.axes[panel].patches:
        if patch.get_gid():
            box = (patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height())
            found.setdefault(patch.get_gid().partition("/")[2], []).append(box)
    return found


def texts(canvas: Any) -> str:
    return "\n".join(t.get_text() for t in (*canvas.figure.texts, *(t for a in canvas.figure.axes for t in a.texts)))


def test_an_svg_is_the_same_bytes_each_time_and_drawing_leaves_the_users_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    for name in ("a.svg", "b.svg"):
        draw_timelines([PLAIN], tmp_path / name)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_bars_lie_in_their_lanes_and_each_timeline_starts_at_zero() -> None:
    canvas = timeline_canvas([PLAIN, COLOCATED])
    ((left, low, width, height),) = boxes(canvas, 1)["audio/forward/0"]
    assert (left, width) == (2, 13)
    assert 1 < low < low + height < 2
    ((left, low, width, height),) = boxes(canvas, 0)["image/backward/0"]
    assert (left, width) == (11, 19)
    assert low < 1 < low + height
    first, second = canvas.figure.axes[:2]
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[0] == 0


def test_a_picture_says_the_length_of_a_step_and_that_a_plan_is_predicted_and_a_timeline_empty() -> None:
    assert "step 0: 30 ms" in texts(timeline_canvas([PLAIN]))
    said = texts(timeline_canvas([COLOCATED, timeline()], plan=PLAN))
    assert "the plan predicted 13 ms a step" in said
    assert "(not measured)" in said
    assert "nothing was recorded" in said


def test_names_are_neither_mathematics_nor_hidden(tmp_path: Path) -> None:
    run = timeline(span("_private$x$", "forward", (0,), 0, 5), span("a" * 300, "forward", (1,), 0, 5), title="$\\frac")
    draw_timelines([run], tmp_path / "a.png", subtitle="b" * 500)
    assert "_private$x$" in texts(timeline_canvas([run]))


def steps(*numbers: int) -> tuple[Span, ...]:
    pairs = ((number, phase) for number in numbers for phase in ("forward", "backward"))
    return tuple(span("image", phase, (0,), index, index + 1, step) for index, (step, phase) in enumerate(pairs))


def test_only_the_last_whole_steps_are_drawn() -> None:
    run = timeline(*steps(0, 1, 2, 3), span("image", "forward", (0,), 8, 9, 4))
    assert list(choose_steps(run, 2)) == [2, 3]
    assert list(choose_steps(timeline(*steps(0)), 5)) == [0]
    assert set(boxes(timeline_canvas([run], num_steps=1))) == {"image/forward/3", "image/backward/3"}


def stalling() -> Timeline:
    """Five steps of 10, 11, 12, 13 and, the last, 1,800 ms."""
    starts = (0, 100, 200, 300, 400)
    lengths = (10, 11, 12, 13, 1800)
    return timeline(
        *(
            span("image", "forward", (0,), a, a + n, step)
            for step, (a, n) in enumerate(zip(starts, lengths, strict=True))
        )
    )


def test_typical_steps_leave_out_one_that_stalled_and_the_picture_says_so() -> None:
    assert list(choose_steps(stalling(), 1, "typical")) == [2]
    assert list(choose_steps(stalling(), 1, "last")) == [4]
    assert "1 of 5 steps, nearest to their median" in texts(
        timeline_canvas([stalling()], num_steps=1, choice="typical")
    )


def test_what_cannot_be_drawn_or_written_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 timelines"):
        draw_timelines([], tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"use \.png or \.svg"):
        draw_timelines([PLAIN], tmp_path / "a.jpg")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(MosaicError, match=r"cannot write .*a\.png"):
        draw_timelines([PLAIN], tmp_path / "file" / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_matplotlib_is_named_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MosaicError, match=r"pip install 'mosaic-colocate\[plot\]'"):
        draw_timelines([PLAIN], tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


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


def test_a_planned_module_is_as_tall_as_its_quota_on_each_of_its_devices() -> None:
    canvas = plan_canvas(PLAN)
    found = boxes(canvas)
    assert found["image/forward/0"] == [(0, 0, 5, 0.75)]
    assert found["image/forward/1"] == [(0, 1.12, 5, 0.75)]
    assert found["audio/forward/0"] == [(0, 0.75, 3, 0.25)]
    # Backwards follow all forwards, in reverse order.
    assert [found[f"{name}/0"][0][0] for name in ("head/forward", "head/backward", "image/backward")] == [5, 9, 11]
    text = texts(canvas)
    assert "(predicted)" in text
    assert "predicted speed-up 2.00×" in text


def test_a_plan_of_a_busy_machine_says_so_in_its_file_its_picture_and_its_table(tmp_path: Path) -> None:
    note = "while its modules were measured, other processes used 61% of the CPU; times are not comparable"
    save(replace(PLAN, foreign_cpu_share=0.61, device=replace(PLAN.device, kind="host")), tmp_path / "plan.json")
    plan = load(Plan, tmp_path / "plan.json")
    assert note in texts(plan_canvas(plan))
    assert note in str(plan_table(plan).caption)
    assert "while its modules" not in texts(plan_canvas(PLAN)) + str(plan_table(PLAN).caption)


def test_the_sequential_plan_is_drawn_above_on_the_same_axis(tmp_path: Path) -> None:
    stages = tuple(Stage(placements=(placement(name, (0, 1, 2, 3), 9),)) for name in ("image", "audio", "head"))
    sequential = Plan(device=PLAN.device, stages=stages, graph="g", search=SearchRecord(method="sequential"))
    first, second = plan_canvas(PLAN, sequential=sequential).figure.axes[:2]
    assert first.get_xlim() == second.get_xlim()
    assert len([p for p in first.patches if p.get_gid()]) == 6
    draw_plan(PLAN, tmp_path / "plan.png", sequential=sequential)
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("slot", "start", "end", "overlap"), [(1, 5, 15, 0.5), (1, 0, 10, 1.0), (1, 10, 20, 0.0), (0, 5, 15, 0.0)]
)
def test_overlap_counts_lane_time_with_another_lane_busy(slot: int, start: int, end: int, overlap: float) -> None:
    run = timeline(span("a", "forward", (0,), 0, 10), span("b", "forward", (slot,), start, end))
    assert run.overlap == pytest.approx(overlap)
    assert timeline().overlap == 0
