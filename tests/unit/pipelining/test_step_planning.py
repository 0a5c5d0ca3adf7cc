"""Steps of a pipeline, planned ahead in a process that has no torch."""

from __future__ import annotations

from bench.papers.pipeline_models import find_known_model
from mosaic.pipelining.next_step import NextStepPlanner
from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import PlannerOptions, plan_step
from mosaic.pipelining.rank_space import RankSpace
from mosaic.pipelining.schedule.check import check_pipeline_schedule
from mosaic.pipelining.step_planning import StepPlanning
from mosaic.pipelining.workload.microbatch import Microbatch


def test_each_step_is_planned_ahead_for_its_own_microbatches_and_no_later_than_in_natural_order():
    known = find_known_model("vlm-s")
    drawn = [[Microbatch(text_tokens=8192 - 169 * count, images=count) for count in step] for step in ((3, 9), (0, 20))]
    request = Request(model=known.model(), num_ranks=4, microbatches=drawn[0])
    partition, space = partition_by("separated", request), RankSpace(limit_bytes=80 * 10**9)
    planning = StepPlanning(request=request, partition=partition, space=space, options=PlannerOptions(weights="with"))
    with NextStepPlanner(planning) as planner:
        for step, microbatches in enumerate(drawn):
            planner.start(step, microbatches, step_s=2.0)
            planned = planner.take(step, wait_s=60.0)
            assert not planned.error
            graph = space.tasks(request, partition, microbatches)
            natural = plan_step(
                request, microbatches, partition=partition, options=PlannerOptions(method="natural", weights="with")
            )
            assert check_pipeline_schedule(planned.schedule, graph).makespan_ns <= 1.05 * natural.makespan_ns
