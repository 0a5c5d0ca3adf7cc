"""Laws of schedules: random orders that keep the dependencies run to their end, no shorter than chain and lane."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import device_of, graph_of

from mosaic.artifact import parse, to_json
from mosaic.errors import InvalidScheduleError
from mosaic.graph import ModuleGraph, Part
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.schedule import Action, ActionKind, Schedule
from mosaic.simulate.order import Work, check_schedule, waits_of
from mosaic.simulate.step import simulate

BOUNDED = settings(max_examples=80, deadline=None, derandomize=True)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, ModuleGraph]:
    names = "abcd"[: draw(st.integers(1, 4))]
    edges = [(m, n) for i, m in enumerate(names) for n in names[i + 1 :] if draw(st.booleans())]
    graph = graph_of(names, edges)
    num_devices = draw(st.integers(1, 3))
    stages = []
    for name in names:
        total = draw(st.integers(1, 3))
        for first in range(total):
            ranks = tuple(sorted(draw(st.sets(st.integers(0, num_devices - 1), min_size=1))))
            placement = Placement(
                part=Part(module=name, first=first, total=total),
                slots=draw(st.sampled_from([(0,), (1,), (0, 1)])),
                grid=Grid(ranks=ranks),
                forward_ms=draw(st.integers(0, 9)),
                backward_ms=draw(st.integers(0, 9)),
            )
            stages.append(Stage(placements=(placement,)))
    plan = Plan(
        device=device_of(2),
        num_devices=num_devices,
        stages=tuple(stages),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )
    return plan, graph


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Plan, ModuleGraph, Schedule]:
    plan, graph = draw(plans())
    num_microbatches = draw(st.integers(1, 3))
    waits = waits_of(plan, graph, num_microbatches)
    order: dict[Work, None] = {}
    while len(order) < len(waits):
        ready = [work for work, others in waits.items() if work not in order and order.keys() >= others.keys()]
        order[draw(st.sampled_from(ready))] = None
    ranks = {placement.part: placement.devices for placement in plan.placements}
    actions = [
        Action(rank=rank, kind=work.kind, part=work.part, microbatch=work.microbatch)
        for work in order
        for rank in ranks[work.part]
    ]
    made = Schedule.of(actions, plan=plan.fingerprint, num_ranks=plan.num_devices, num_microbatches=num_microbatches)
    return plan, graph, made


@given(scheduled())
@BOUNDED
def test_a_schedule_takes_no_less_than_its_longest_chain_and_its_busiest_slot(
    case: tuple[Plan, ModuleGraph, Schedule],
) -> None:
    plan, graph, schedule = case
    placed = {placement.part: placement for placement in plan.placements}
    step = simulate(plan, graph, schedule=schedule)
    spans = {span.work: span for span in step.spans}
    waits = waits_of(plan, graph, schedule.num_microbatches)
    assert spans.keys() == waits.keys()
    assert all(spans[other].end_ms <= spans[work].start_ms for work, others in waits.items() for other in others)
    chain: dict[Work, float] = {}
    busy: dict[tuple[int, int], float] = defaultdict(float)
    for work in check_schedule(schedule, plan, graph):
        own = placed[work.part]
        length = own.forward_ms if work.kind is ActionKind.FORWARD else own.backward_ms
        chain[work] = length + max((chain[other] for other in waits[work]), default=0.0)
        for cell in own.cells:
            busy[cell] += length
    assert max(*chain.values(), *busy.values()) <= step.makespan_ms
    assert sum(span.end_ms - span.start_ms for span in step.critical) == pytest.approx(step.makespan_ms)


@given(scheduled())
@BOUNDED
def test_each_slot_runs_one_work_at_a_time_in_the_order_of_its_rank(case: tuple[Plan, ModuleGraph, Schedule]) -> None:
    plan, graph, schedule = case
    placed = {placement.part: placement for placement in plan.placements}
    spans = {span.work: span for span in simulate(plan, graph, schedule=schedule).spans}
    for rank in range(plan.num_devices):
        works = [Work(kind=a.kind, part=a.part, microbatch=a.microbatch) for a in schedule.actions(rank)]
        for index, work in enumerate(works):
            for later in works[index + 1 :]:
                shares = set(placed[work.part].slots) & set(placed[later.part].slots)
                assert not shares or spans[work].end_ms <= spans[later].start_ms


@given(scheduled())
@BOUNDED
def test_a_schedule_and_its_actions_survive_text(case: tuple[Plan, ModuleGraph, Schedule]) -> None:
    plan, _, schedule = case
    assert parse(Schedule, to_json(schedule), source="schedule.json") == schedule
    assert parse(Plan, to_json(plan), source="plan.json") == plan
    actions = [action for rank in range(plan.num_devices) for action in schedule.actions(rank)]
    assert [Action.parse(str(action)) for action in actions] == actions


@given(scheduled(), st.data())
@BOUNDED
def test_an_order_against_a_dependency_never_ends_and_is_refused(
    case: tuple[Plan, ModuleGraph, Schedule], data: st.DataObject
) -> None:
    plan, graph, schedule = case
    rank = data.draw(st.sampled_from([rank for rank, row in enumerate(schedule.rows) if row]))
    row = list(schedule.rows[rank])
    forward = next(place for place, cell in enumerate(row) if cell.startswith("F"))
    backward = row.index("B" + row[forward][1:])
    row[forward], row[backward] = row[backward], row[forward]
    rows = tuple(tuple(row) if index == rank else other for index, other in enumerate(schedule.rows))
    wrong = Schedule(plan=plan.fingerprint, num_microbatches=schedule.num_microbatches, rows=rows)
    with pytest.raises(InvalidScheduleError, match="both wait for ever"):
        check_schedule(wrong, plan, graph)
