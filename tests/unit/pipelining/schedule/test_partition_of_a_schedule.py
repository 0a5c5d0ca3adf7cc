"""Partitions read from schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipeline_cases import images, two_encoders, vision_and_text

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import PlannerOptions, plan_step
from mosaic.pipelining.schedule import PipelineSchedule, partition_of_schedule


def planned(request: Request, method: str, *, step: tuple = images(2, 5)) -> PipelineSchedule:
    partition = partition_by(method, request)
    return plan_step(request, step, partition=partition, options=PlannerOptions(method="natural")).schedule()


@pytest.mark.parametrize("method", ["separated", "mixed-v", "mixed-time"])
def test_a_schedules_partition_has_its_chunks_on_their_ranks(method: str):
    request = Request(model=vision_and_text(), num_ranks=2, microbatches=images(2, 5), sizes={"vision": 2})
    right = partition_by(method, request)
    found = partition_of_schedule(planned(request, method), request)
    assert [(one.parts, one.rank) for one in found.chunks] == [(one.parts, one.rank) for one in right.chunks]
    assert found.sizes == right.sizes
    assert found.num_ranks == 2


def test_a_schedule_of_another_model_is_refused_and_both_are_named():
    request = Request(model=vision_and_text(), num_ranks=2, microbatches=images(2))
    other = replace(request, model=two_encoders())
    with pytest.raises(InvalidScheduleError, match=r"of vision of 8 layers, text of 8 .* vision of 6 layers, audio"):
        partition_of_schedule(planned(request, "separated"), other)
