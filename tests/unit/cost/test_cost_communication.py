"""The time of communication: rows that travel and gradients that are summed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import device_of, flat, linear, profile_of

from mosaic.cost import CostModel
from mosaic.cost.communication import (
    BUCKET_BYTES,
    ModuleTraffic,
    RankedCost,
    exposed_ms,
    route_ms,
    routed,
)
from mosaic.hardware import Link, find_cluster
from mosaic.profile import Phase
from mosaic.ranks.rows.routing import RowRouting
from mosaic.solver.runnable import plan_to_run

LINK = Link(gb_per_s=1.0, latency_us=100.0)
MB = 10**6


def ranked(times, traffic, num_ranks=2, link=LINK, num_slots=1, **options) -> RankedCost:
    profile = profile_of(times, num_slots=num_slots, degrees=tuple(range(1, num_ranks + 1)))
    return RankedCost(CostModel.from_profile(profile), traffic, link, num_ranks, **options)


@given(st.integers(1, 8), st.data())
def test_predicted_rows_travel_between_the_ranks_between_which_the_routing_of_rows_moves_them(
    num_ranks: int, data: st.DataObject
):
    degree = data.draw(st.integers(1, num_ranks))
    each = math.lcm(*range(1, num_ranks + 1))
    moves = RowRouting(held=(each,) * num_ranks, members=tuple(range(degree))).moves
    moved = {
        (source, target): count / (each * num_ranks)
        for source, row in enumerate(moves)
        for target, count in enumerate(row)
        if source != target and count
    }
    assert {(source, target): share for source, target, share in routed(num_ranks, degree)} == pytest.approx(moved)


def test_a_way_takes_the_latency_of_each_partner_and_the_bytes_of_the_busiest():
    # One of four ranks runs it: it gets three quarters of the rows, from three others.
    assert route_ms(4 * MB, 4, 1, LINK) == pytest.approx(3 * 0.1 + 3.0)
    assert route_ms(4 * MB, 4, 4, LINK) == 0.0
    assert route_ms(0, 4, 1, LINK) == 0.0


def test_rows_from_another_node_take_the_nics_of_its_devices_and_not_one():
    pod = find_cluster("h100-80g", 16)
    num_bytes, reached = 8 * 10**9, 0.8
    # Each rank of the second node sends 1/16 of the rows to one of the first, over its own NIC.
    whole = route_ms(num_bytes, 16, 8, pod)
    assert whole == pytest.approx(1000 * num_bytes / 16 / (50e9 * reached), rel=1e-2)
    # One member gets 15/16 of them, 8/16 from the other node: all over its own NIC.
    assert route_ms(num_bytes, 16, 1, pod) == pytest.approx(8 * whole, rel=1e-2)


@given(st.floats(0, 50), st.floats(0, 50), st.integers(1, 9))
def test_what_the_backward_hides_of_the_buckets_is_what_a_ring_beside_it_does(total: float, backward: float, num: int):
    end = 0.0
    for bucket in range(1, num + 1):
        end = max(end, backward * bucket / num) + total / num
    assert exposed_ms(total, backward, num) == pytest.approx(end - backward, abs=1e-9)


def test_the_sum_of_gradients_is_what_its_backward_does_not_hide():
    traffic = {"a": ModuleTraffic(parameter_gradients=2 * BUCKET_BYTES)}
    cost = ranked({"a": flat(4)}, traffic)
    # Two buckets of 2 x 0.1 + 26.2 ms each; the first has the second half of the backward to hide behind.
    sent = cost.communication("a", 2, 1)
    whole = 2 * (0.2 + BUCKET_BYTES / MB)
    assert sent.reduce_ms == pytest.approx(whole - 2.0)
    assert cost.time_ms("a", Phase.BACKWARD, 2, 1) == pytest.approx(4 + whole - 2.0)
    assert cost.time_ms("a", Phase.BACKWARD, 1, 1) == pytest.approx(4)


@pytest.mark.parametrize("method", ["exact", "gahc", "sequential"])
@pytest.mark.parametrize(("gradients", "degree"), [(0, 2), (50 * MB, 1)])
def test_the_degree_is_chosen_by_what_travels(method: str, gradients: int, degree: int):
    times = {"a": linear(20)}
    cost = ranked(times, {"a": ModuleTraffic(parameter_gradients=gradients)})
    plan = plan_to_run(method, profile_of(times, num_slots=1).graph, cost, device_of(1), num_devices=2)
    assert plan.placement("a").degree == degree
