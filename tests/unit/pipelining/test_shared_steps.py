"""Steps that replicas share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pipeline_cases import images, vision_and_text

from mosaic.pipelining.check import check_pipeline_schedule
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.next_step import NextStepPlanner, StepPlanning
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import share_out
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import roll_out


@given(times=st.lists(st.floats(0.0, 10.0), max_size=12), num_replicas=st.integers(1, 5))
def test_each_microbatch_is_in_one_share_and_no_share_is_far_above_the_others(times: list[float], num_replicas: int):
    shares = share_out(times, num_replicas)
    assert sorted(at for share in shares for at in share) == list(range(len(times)))
    assert all(list(share) == sorted(share) for share in shares)
    loads = [sum(times[at] for at in share) for share in shares]
    assert max(loads) - min(loads) <= max(times, default=0.0) + 1e-9
    assert bool(shares[0]) == bool(times)
    assert max(map(len, shares)) <= 1 or len(times) > num_replicas or 0.0 in times


def test_each_replica_with_microbatches_has_a_schedule_of_its_share():
    request = Request(model=vision_and_text(2, 2), num_ranks=2, microbatches=images(1, 2))
    planning = StepPlanning(request=request, partition=partition_by("separated", request), num_replicas=3)
    shared = planning(images(2, 1), OrderLimits(seconds=0.2))
    assert shared.shares == ((0,), (1,), ())
    assert [schedule and schedule.num_microbatches for schedule in shared.schedules] == [1, 1, None]


def test_each_step_is_planned_ahead_for_its_own_microbatches():
    request = Request(model=vision_and_text(2, 2), num_ranks=2, microbatches=images(1, 2))
    partition = partition_by("separated", request)
    with NextStepPlanner(StepPlanning(request=request, partition=partition)) as planner:
        for number, step in enumerate((images(3, 1), images(0, 2, 1))):
            planner.start(number, step, step_s=0.5)
            planned = planner.take(number, wait_s=60.0)
            assert not planned.error
            (schedule,) = planned.schedule.schedules
            graph = task_graph(request.model, partition, step)
            natural = roll_out(graph)
            assert isinstance(natural, tuple)
            assert check_pipeline_schedule(schedule, graph).makespan_ns <= 1.001 * natural[1].makespan_ns
