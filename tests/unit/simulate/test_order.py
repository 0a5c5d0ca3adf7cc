"""What a schedule must keep: its own rank's parts, each once, and nobody who waits for ever."""

from __future__ import annotations

import pytest
from planning_cases import device_of, graph_of

from mosaic.errors import InvalidScheduleError
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.schedule import Schedule
from mosaic.simulate.order import check_schedule, staged_schedule
from mosaic.simulate.step import simulate

GRAPH = graph_of(["a", "b"], ["ab"])
FIRST, LAST = (Part(module="b", first=first, count=2, total=4) for first in (0, 2))


def plan_of(*placed: tuple[Part, tuple[int, ...]], num_devices: int = 2) -> Plan:
    stages = tuple(
        Stage(placements=(Placement(part=part, slots=(0,), grid=Grid(ranks=ranks), forward_ms=1.0, backward_ms=2.0),))
        for part, ranks in placed
    )
    return Plan(
        device=device_of(1),
        num_devices=num_devices,
        stages=stages,
        graph=GRAPH.fingerprint,
        search=SearchRecord(method="manual"),
    )


CHAIN = plan_of((Part(module="a"), (0,)), (Part(module="b"), (1,)))
SLICED = plan_of((Part(module="a"), (0,)), (FIRST, (1,)), (LAST, (0, 1)))


def schedule(plan: Plan, *rows: str, num_microbatches: int = 1) -> Schedule:
    return Schedule(
        plan=plan.fingerprint, num_microbatches=num_microbatches, rows=tuple(tuple(r.split()) for r in rows)
    )


def test_stages_are_a_schedule() -> None:
    assert staged_schedule(SLICED).rows == (
        ("F0:a", "F0:b[2:4/4]", "B0:b[2:4/4]", "B0:a"),
        ("F0:b[0:2/4]", "F0:b[2:4/4]", "B0:b[2:4/4]", "B0:b[0:2/4]"),
    )
    step = simulate(SLICED, GRAPH, schedule=staged_schedule(SLICED))
    assert step == simulate(SLICED, GRAPH)
    assert step.makespan_ms == pytest.approx(3 * (1 + 2))


def test_one_forward_one_backward_overlaps_microbatches() -> None:
    made = schedule(CHAIN, "F0:a F1:a B0:a B1:a", "F0:b B0:b F1:b B1:b", num_microbatches=2)
    step = simulate(CHAIN, GRAPH, schedule=made)
    starts = {str(span.work): span.start_ms for span in step.spans}
    assert starts == {"F0:a": 0, "F1:a": 1, "B0:a": 4, "B1:a": 7, "F0:b": 1, "B0:b": 2, "F1:b": 4, "B1:b": 5}
    assert step.makespan_ms == 9
    assert staged_schedule(CHAIN, 2).rows[0] == ("F0:a", "F1:a", "B1:a", "B0:a")


@pytest.mark.parametrize(
    ("plan", "rows", "cell", "problem"),
    [
        (CHAIN, ("F0:a B0:a F0:b", "F0:b B0:b"), (0, 2), "the plan does not have b on this rank"),
        (CHAIN, ("F0:a B0:a W0:a", "F0:b B0:b"), (0, 2), "has weights within B; write F or B"),
        (CHAIN, ("F0:a B0:a", "F0:b[0:2/4] B0:b"), (1, 0), r"the plan does not have b\[0:2/4\]"),
        (CHAIN, ("F0:a F1:a B0:a", "F0:b B0:b"), (0, 1), "there are 1 microbatches"),
        (CHAIN, ("F0:a F0:a B0:a", "F0:b B0:b"), (0, 1), "it is there twice"),
        (CHAIN, ("F0:a", "F0:b B0:b"), (0, 1), "its end.*B0:a is missing"),
        (CHAIN, ("B0:a F0:a", "F0:b B0:b"), (0, 0), "waits for F0:a of rank 0, which stands at B0:a"),
        (CHAIN, ("F0:a B0:a", "B0:b F0:b"), (0, 1), "waits for B0:b of rank 1"),
        (CHAIN, ("F0:a B0:a",), (0, 0), "on 1 ranks; this one is"),
        (
            SLICED,  # the two ranks of a part come to it in different orders
            ("F0:a B0:b[2:4/4] F0:b[2:4/4] B0:a", "F0:b[0:2/4] F0:b[2:4/4] B0:b[2:4/4] B0:b[0:2/4]"),
            (0, 1),
            r"waits for F0:b\[2:4/4\] of rank 0",
        ),
    ],
)
def test_a_schedule_that_does_not_run_is_refused_with_its_cell(
    plan: Plan, rows: tuple[str, ...], cell: tuple[int, int], problem: str
) -> None:
    with pytest.raises(InvalidScheduleError, match=problem) as caught:
        check_schedule(schedule(plan, *rows), plan, GRAPH)
    assert caught.value.cell == cell
    assert caught.value.grid.startswith("rank 0: ")


def test_a_schedule_of_another_plan_is_refused() -> None:
    with pytest.raises(InvalidScheduleError, match="make the schedule again"):
        check_schedule(staged_schedule(CHAIN), SLICED, GRAPH)
