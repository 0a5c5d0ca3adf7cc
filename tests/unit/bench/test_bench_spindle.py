"""Spindle's workloads: parameters of several tasks, and planners' speed-ups beside the paper's."""

from __future__ import annotations

import pytest
import torch

from bench.papers.spindle import TINY, workload
from mosaic.cli.workload import load_workload


def test_an_encoder_of_several_tasks_has_a_part_of_its_parameters_in_each():
    both, alone = (workload("multitask-clip", tasks, TINY) for tasks in (["image_text", "image_audio"], ["image_text"]))

    def gradient_bytes(own, name: str) -> int:
        return own.counts[f"image_text/encoders.{name}"][1].memory.gradient_bytes

    assert len(both.graph.names) == 4
    assert gradient_bytes(both, "image") == gradient_bytes(alone, "image") // 2
    assert gradient_bytes(both, "text") == gradient_bytes(alone, "text")


def test_a_model_of_the_zoo_is_given_with_some_of_its_tasks() -> None:
    meta = torch.device("meta")
    assert list(load_workload("zoo:multitask-clip-tiny:2:image_text,image_audio", device=meta).sample) == [
        *("image_text", "image_audio")
    ]
    with pytest.raises(ValueError, match="there is no task 'driving'; choose some of image_text"):
        load_workload("zoo:multitask-clip-tiny:2:driving", device=meta)
    with pytest.raises(ValueError, match="there is no task 'driving'; choose some of none"):
        load_workload("zoo:clip-tiny:2:driving", device=meta)
