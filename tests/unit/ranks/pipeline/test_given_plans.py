"""How ranks are laid out, and plans that are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline_cases import images, two_encoders, vision_and_text
from torch import nn

import mosaic
from mosaic.artifact import save
from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import PlannerOptions, plan_step
from mosaic.ranks.pipeline.setup import degrees_of, partition_of

REQUEST = Request(model=vision_and_text(), num_ranks=2, microbatches=images(2))


@pytest.mark.parametrize(
    ("num_ranks", "data", "tensor", "is_planned", "said"),
    [
        (4, 3, 1, False, "data=3, tensor=1, and there are 4 ranks"),
        (4, None, 0, False, "tensor=0"),
        (3, None, 1, True, "the plan is for 2 ranks.*start 2 ranks"),
        (4, 1, 1, True, "the plan is for 2 ranks.*start 2 ranks"),
    ],
)
def test_ranks_that_cannot_be_laid_out_so_are_refused(
    num_ranks: int, data: int | None, tensor: int, is_planned: bool, said: str
):
    partition = partition_by("separated", REQUEST) if is_planned else None
    with pytest.raises(ValueError, match=said):
        degrees_of(num_ranks, data=data, tensor={"vision": tensor, "text": tensor}, partition=partition)


def test_a_plan_is_a_partition_a_schedule_or_its_file(tmp_path: Path):
    planned = plan_step(REQUEST, images(2), options=PlannerOptions(method="natural", partition="mixed-time"))
    save(planned.schedule(), tmp_path / "schedule.json")
    for plan in (planned.partition, planned.schedule(), tmp_path / "schedule.json", str(tmp_path / "schedule.json")):
        found = partition_of(plan, REQUEST)
        assert [(one.parts, one.rank) for one in found.chunks] == [
            (one.parts, one.rank) for one in planned.partition.chunks
        ]

    with pytest.raises(TypeError, match="plan=3 is, or makes, a int; pass a Partition or a PipelineSchedule"):
        partition_of(lambda _: 3, REQUEST)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("name", "value"), [("ranks", 3), ("options", 3), ("context", 2), ("modules", ["layers"])])
def test_arguments_of_another_type_are_refused_by_name(name: str, value: Any):
    with pytest.raises(TypeError, match=rf"^{name}=.* is a (int|list); pass "):
        mosaic.pipeline(nn.Identity(), {}, **{name: value})


def test_a_schedule_of_another_model_is_refused_and_both_are_named():
    planned = plan_step(REQUEST, images(2), options=PlannerOptions(method="natural", partition="mixed-time"))
    with pytest.raises(InvalidScheduleError, match=r"has the modules vision, audio, text, the partition vision, text"):
        partition_of(planned.schedule(), replace(REQUEST, model=two_encoders()))
