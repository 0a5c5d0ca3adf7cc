"""Simulated steps worked out by hand: starts without barriers, neighbours, moving data, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import device_of, flat, graph_of, pair, profile_of

from mosaic.cost import CostModel
from mosaic.cost.communication import GradientSum
from mosaic.errors import InvalidPlanError
from mosaic.graph import Edge, Part
from mosaic.hardware import Link
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.profile import Phase
from mosaic.schedule import ActionKind
from mosaic.simulate.order import Work
from mosaic.simulate.reshard import reshard_ms
from mosaic.simulate.step import StepModel, simulate


def placed(
    module: str, slots: range, ms: float, *, devices: tuple[int, ...] = (0,), backward_ms: float = 0
) -> Placement:
    return Placement(
        part=Part(module=module),
        slots=tuple(slots),
        grid=Grid(ranks=devices),
        forward_ms=ms,
        backward_ms=backward_ms or ms,
    )


def plan_of(*stages: tuple[Placement, ...], edges: tuple[tuple[str, str], ...] = (), num_devices: int = 1):
    graph = graph_of([p.module for stage in stages for p in stage], edges)
    plan = Plan(
        device=device_of(4),
        num_devices=num_devices,
        stages=tuple(Stage(placements=stage) for stage in stages),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )
    return plan, graph


LONG_BESIDE_TWO = (
    (placed("long", range(0, 2), 5), placed("first", range(2, 4), 2)),
    (placed("second", range(2, 4), 3),),
)


def forward(module: str) -> Work:
    return Work(kind=ActionKind.FORWARD, part=Part(module=module))


def test_one_lane_runs_two_short_modules_beside_a_long_one() -> None:
    plan, graph = plan_of(*LONG_BESIDE_TWO)
    step = simulate(plan, graph)
    assert plan.predicted_ms == 16
    assert step.forward_ms == pytest.approx(5)
    assert step.makespan_ms == pytest.approx(10)
    second = next(span for span in step.spans if span.module == "second")
    assert (second.start_ms, second.end_ms, second.after) == (pytest.approx(2), pytest.approx(5), forward("first"))


def test_backward_runs_in_the_reverse_order() -> None:
    plan, graph = plan_of(*LONG_BESIDE_TWO)
    backward = {span.module: span for span in simulate(plan, graph).spans if span.phase is Phase.BACKWARD}
    assert backward["second"].start_ms == pytest.approx(5)
    assert backward["first"].after.part.module == "second"


def test_a_module_waits_for_what_feeds_it_even_where_its_slots_are_free() -> None:
    plan, graph = plan_of(*LONG_BESIDE_TWO, edges=(("long", "second"),))
    step = simulate(plan, graph)
    assert step.makespan_ms == pytest.approx(16)
    assert [span.module for span in step.critical] == ["long", "second", "second", "long"]


def test_neighbours_are_those_that_really_run_beside() -> None:
    pairs = [pair(m, "loud", 2.0, phase=phase) for m in ("first", "second") for phase in Phase]
    pairs += [pair("loud", m, 1.0, phase=phase) for m in ("first", "second") for phase in Phase]
    profile = profile_of({"loud": flat(6), "first": flat(2), "second": flat(4)}, num_slots=4, pairs=pairs)
    plan, graph = plan_of(
        (placed("loud", range(2), 6), placed("first", range(2, 4), 4)), (placed("second", range(2, 4), 4),)
    )
    spans = {s.module: s for s in simulate(plan, graph, StepModel(cost=CostModel.from_profile(profile))).spans[:3]}
    assert spans["first"].end_ms == pytest.approx(4)
    # Half as fast for 2 ms beside ``loud``, which takes one of its four milliseconds; then alone.
    assert spans["second"].end_ms == pytest.approx(4 + 2 + 3)


def test_data_moves_between_modules_on_different_devices() -> None:
    link = Link(gb_per_s=1.0, latency_us=500)
    one, other = placed("a", range(1), 1), placed("b", range(1), 1, devices=(1,))
    both = placed("c", range(1), 1, devices=(0, 1))
    megabyte = 1_000_000
    assert reshard_ms(one, replace(one, part=Part(module="d")), megabyte, link) == 0
    assert reshard_ms(one, other, megabyte, link) == pytest.approx(0.5 + 1)
    assert reshard_ms(one, both, megabyte, link) == pytest.approx(0.5 + 0.5)
    assert reshard_ms(both, other, megabyte, link) == pytest.approx(0.5 + 0.5)
    plan, graph = plan_of((one,), (other,), edges=(("a", "b"),), num_devices=2)
    graph = replace(graph, edges=(Edge(source="a", target="b", num_bytes=megabyte),))
    step = simulate(plan, graph, StepModel(network=link))
    assert step.makespan_ms == pytest.approx(4 + 2 * 1.5)


def test_sums_of_gradients_share_the_network_of_their_devices() -> None:
    own = [placed(name, range(at, at + 1), 4, devices=(0, 1), backward_ms=5) for at, name in enumerate("ab")]
    plan, graph = plan_of(tuple(replace(one, reduce_ms=1.0) for one in own), num_devices=2)
    sums = {("a", 2): GradientSum(time_ms=4, buckets=4), ("b", 2): GradientSum(time_ms=4, buckets=4)}
    step = simulate(plan, graph, StepModel(sums=lambda module, degree: sums[module, degree]))
    # Forwards end at 4, backwards without sums at 8; both modules' first buckets are ready at 5.
    assert step.makespan_ms == pytest.approx(5 + 8)
    assert simulate(plan, graph).makespan_ms == pytest.approx(4 + 5)
    with pytest.raises(ValueError, match="cost and sums"):
        StepModel(
            sums=lambda module, degree: GradientSum(),
            cost=CostModel.from_profile(profile_of({"a": flat(1)}, num_slots=1)),
        )


def test_a_slice_sums_buckets_of_the_size_of_its_modules() -> None:
    halves = [
        replace(placed("a", range(1), 4, devices=(0, 1)), part=Part(module="a", first=at, count=2, total=4))
        for at in (0, 2)
    ]
    whole, graph = plan_of((placed("a", range(1), 4, devices=(0, 1)),), num_devices=2)
    plan = replace(whole, stages=tuple(Stage(placements=(half,)) for half in halves))
    step = simulate(plan, graph, StepModel(sums=lambda module, degree: GradientSum(time_ms=4, buckets=2)))
    assert step.makespan_ms == pytest.approx(4 * 4 + 2)  # a bucket of 2 ms a half; the last one is ready at the end


def test_a_plan_of_another_graph_is_refused() -> None:
    plan, _ = plan_of((placed("a", range(1), 1),))
    with pytest.raises(InvalidPlanError, match="leaves out"):
        simulate(plan, graph_of("ab"))
