"""Metadata of microbatches."""

from __future__ import annotations

from typing import Any

import pytest

from mosaic.pipelining.workload.microbatch import Microbatch


def test_a_microbatch_without_any_modality_is_refused() -> None:
    with pytest.raises(ValueError, match="without text, images, audio or video"):
        Microbatch()


@pytest.mark.parametrize(
    "bad",
    [
        {"text_tokens": -1},
        {"images": 1.5},
        {"images": True},
        {"text_tokens": 1, "audio_s": float("nan")},
        {"text_tokens": 1, "video_s": float("inf")},
        {"text_tokens": 1, "video_s": -1.0},
        {"text_tokens": 1, "clips": 2},
    ],
)
def test_figures_that_are_negative_not_finite_or_not_whole_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"microbatch: \w+="):
        Microbatch(**bad)


def test_video_without_a_number_of_clips_is_one_clip() -> None:
    assert Microbatch(video_s=3.0).num_clips == 1
    assert Microbatch(video_s=3.0, clips=2).num_clips == 2
    assert Microbatch(text_tokens=1).num_clips == 0
