"""Spindle's workloads: parameters of several tasks, and planners' speed-ups beside the paper's."""

from __future__ import annotations

import pytest
import torch

from bench.papers.spindle import TINY, speed_ups, workload
from mosaic.cli.workload import load_workload


def test_an_encoder_of_several_tasks_has_a_part_of_its_parameters_in_each():
    both, alone = (workload("multitask-clip", tasks, TINY) for tasks in (["image_text", "image_audio"], ["image_text"]))

    def gradient_bytes(own, name: str) -> int:
        return own.counts[f"image_text/encoders.{name}"][1].memory.gradient_bytes

    assert len(both.graph.names) == 4
    assert gradient_bytes(both, "image") == gradient_bytes(alone, "image") // 2
    assert gradient_bytes(both, "text") == gradient_bytes(alone, "text")


def test_speed_ups_stand_beside_those_that_the_paper_prints():
    figures = {one.name: one for one in speed_ups("multitask-clip", (1,), (8,), TINY, 0.2)}
    highest = figures["Fig. 8: spindle: highest speed-up over megatron, multitask-clip, any tasks, 8 GPUs"]
    assert (
        highest.value
        == figures["Fig. 8: spindle: speed-up over megatron, multitask-clip (tiny), 1 tasks, 8 GPUs"].value
    )
    assert highest.labels["paper"] == "1.37"


def test_a_model_of_the_zoo_is_given_with_some_of_its_tasks() -> None:
    meta = torch.device("meta")
    assert list(load_workload("zoo:multitask-clip-tiny:2:image_text,image_audio", device=meta).sample) == [
        *("image_text", "image_audio")
    ]
    with pytest.raises(ValueError, match="there is no task 'driving'; choose some of image_text"):
        load_workload("zoo:multitask-clip-tiny:2:driving", device=meta)
    with pytest.raises(ValueError, match="there is no task 'driving'; choose some of none"):
        load_workload("zoo:clip-tiny:2:driving", device=meta)
