"""Lanes really run at the same time: modules meet inside forward and inside backward, which they cannot do in turn."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, TwoTowers, colocate, pair_batch, tower
from meetings import MeetBothWays, Meeting
from torch import nn


class Meets(nn.Module):
    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.layers = tower()
        self.__dict__["meeting"] = meeting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MeetBothWays.apply(self.layers(x), self.meeting)


def spans_of(handle, phase: str) -> list[Any]:
    return [span for span in handle.timeline().spans if span.phase == phase]


@pytest.mark.parametrize("stages", [SIDE_BY_SIDE, [{"left": 1}, {"right": 2}]], ids=["side by side", "in turn"])
def test_modules_of_disjoint_lanes_meet_in_forward_and_in_backward(stages):
    meeting = Meeting()
    model = TwoTowers(Meets(meeting), Meets(meeting))
    handle = colocate(model, pair_batch(), stages)
    try:
        for step in range(4):
            meeting.on = step > 0 and stages is SIDE_BY_SIDE  # the first call is learned in place, one by one
            model(*pair_batch(step)).square().mean().backward()
        for phase in ("forward", "backward"):
            pairs = {}
            for span in spans_of(handle, phase):
                pairs.setdefault(span.step, {})[span.module] = span
            # In the first step a call on a lane is learned, and not recorded.
            pairs = {step: pair for step, pair in pairs.items() if len(pair) == 2}
            for pair in pairs.values():
                left, right = pair["left"], pair["right"]
                overlap = min(left.end_ms, right.end_ms) - max(left.start_ms, right.start_ms)
                assert (overlap > 0) is (stages is SIDE_BY_SIDE)
                assert set(left.slots).isdisjoint(right.slots) is (stages is SIDE_BY_SIDE)
            assert len(pairs) == 3
    finally:
        handle.remove()
    assert meeting.meetings.count("forward") == meeting.meetings.count("backward") == 6 * (stages is SIDE_BY_SIDE)


def test_glue_follows_its_branch_instead_of_waiting_for_it():
    meeting = Meeting()

    class Gluing(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            left = nn.functional.normalize(self.left(x) @ self.weight, dim=-1).reshape(2, 3, 16).mean(1)
            return torch.cat([left, self.right(y)[:2]]) * self.scale

    model = Gluing(Meets(meeting), Meets(meeting))
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        for step in range(3):
            meeting.on = step > 0
            model(*pair_batch(step)).square().mean().backward()
        glue = [span for span in spans_of(handle, "glue") if span.module == "left"]
        assert glue
        assert all(span.slots == (0,) for span in glue)
    finally:
        handle.remove()
    assert meeting.meetings.count("forward") == meeting.meetings.count("backward") == 4


def test_nothing_that_a_step_made_outlives_it():
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    gc.disable()
    try:
        alive = []
        for step in range(10):
            batch = [tensor.requires_grad_() for tensor in pair_batch(step)]
            output = model(*batch)
            alive += [weakref.ref(tensor) for tensor in (output, *batch)]
            output.square().mean().backward()
        del output, batch
        assert sum(ref() is not None for ref in alive) == 0
    finally:
        gc.enable()
        handle.remove()
