"""Simulated steps worked out by hand: starts without barriers, sums of gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import device_of, graph_of

from mosaic.cost.communication import GradientSum
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Plan, SearchRecord, TemporalStage
from mosaic.profile import Phase
from mosaic.simulate.step import SimulatedSpan, last_sum_ms, simulate


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


def plan_of(*stages: tuple[Placement, ...], num_devices: int = 1):
    graph = graph_of([p.module for stage in stages for p in stage])
    plan = Plan(
        device=device_of(4),
        num_devices=num_devices,
        stages=tuple(TemporalStage(placements=stage) for stage in stages),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )
    return plan, graph


def summed(
    start_ms: float, end_ms: float, time_ms: float, buckets: int, *devices: int
) -> tuple[SimulatedSpan, GradientSum]:
    span = SimulatedSpan(part=Part(module="a"), phase=Phase.BACKWARD, devices=devices, start_ms=start_ms, end_ms=end_ms)
    return span, GradientSum(time_ms=time_ms, buckets=buckets)


def test_one_lane_runs_two_short_modules_beside_a_long_one() -> None:
    long_and_first = (placed("long", range(0, 2), 5), placed("first", range(2, 4), 2))
    plan, graph = plan_of(long_and_first, (placed("second", range(2, 4), 3),))
    step = simulate(plan, graph)
    assert plan.predicted_ms == 16
    assert step.makespan_ms == pytest.approx(10)
    second = next(span for span in step.spans if span.part.module == "second")
    assert (second.start_ms, second.end_ms) == (pytest.approx(2), pytest.approx(5))


def test_sums_of_gradients_share_the_network_of_their_devices() -> None:
    own = [placed(name, range(at, at + 1), 4, devices=(0, 1), backward_ms=5) for at, name in enumerate("ab")]
    plan, graph = plan_of(tuple(replace(one, reduce_ms=1.0) for one in own), num_devices=2)
    sums = {("a", 2): GradientSum(time_ms=4, buckets=4), ("b", 2): GradientSum(time_ms=4, buckets=4)}
    step = simulate(plan, graph, sums=lambda module, degree: sums[module, degree])
    # Forwards end at 4, backwards without sums at 8; both modules' first buckets are ready at 5.
    assert step.makespan_ms == pytest.approx(5 + 8)
    assert simulate(plan, graph).makespan_ms == pytest.approx(4 + 5)


def test_a_slice_sums_buckets_of_the_size_of_its_modules() -> None:
    halves = [
        replace(placed("a", range(1), 4, devices=(0, 1)), part=Part(module="a", first=at, count=2, total=4))
        for at in (0, 2)
    ]
    whole, graph = plan_of((placed("a", range(1), 4, devices=(0, 1)),), num_devices=2)
    plan = replace(whole, stages=tuple(TemporalStage(placements=(half,)) for half in halves))
    step = simulate(plan, graph, sums=lambda module, degree: GradientSum(time_ms=4, buckets=2))
    assert step.makespan_ms == pytest.approx(4 * 4 + 2)  # a bucket of 2 ms a half; the last one is ready at the end


PARTS = st.lists(
    st.builds(
        lambda start, length, time, buckets, device: summed(start, start + length, time, buckets, device, device + 1),
        *(st.floats(0, 50), st.floats(0, 50), st.floats(0.1, 50), st.integers(1, 4), st.integers(0, 3)),
    ),
    max_size=5,
)


@given(PARTS)
def test_sums_end_no_sooner_than_the_busiest_device_and_no_later_than_all_in_turn(parts) -> None:
    end_ms, all_ms = last_sum_ms(parts), sum(own.time_ms for _, own in parts)
    busy = [sum(own.time_ms for span, own in parts if device in span.devices) for device in range(5)]
    assert max(busy) - 1e-9 <= end_ms <= max((span.end_ms for span, _ in parts), default=0.0) + all_ms + 1e-9
