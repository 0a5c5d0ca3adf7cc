"""Lanes really run at the same time: modules meet inside forward and inside backward, which they cannot do in turn."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import engine_cases
import pytest
import stream_cases
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
        glue = [span for span in handle.timeline().spans if (span.phase, span.module) == ("glue", "left")]
        assert glue
        assert all(span.slots == (0,) for span in glue)
    finally:
        handle.remove()
    assert meeting.meetings.count("forward") == meeting.meetings.count("backward") == 4


@pytest.mark.parametrize("cases", [engine_cases, stream_cases], ids=["host", "streams"])
def test_nothing_that_a_step_made_outlives_it(cases: Any):
    model = TwoTowers()

    def step() -> list[weakref.ref[torch.Tensor]]:
        x, y = pair_batch()
        left = model.left(x)
        glue = left * 2
        (glue @ model.right(y).T).sum().backward()
        out = model(x, y)
        out.sum().backward()
        plain = [tensor._plain for tensor in (left, glue) if hasattr(tensor, "_plain")]
        return [weakref.ref(tensor) for tensor in (x, left, glue, out, *plain)]

    with cases.colocated(model, pair_batch(), SIDE_BY_SIDE):
        gc.disable()
        try:
            for _ in range(10):
                made = step()
                assert [ref() for ref in made] == [None] * len(made)
        finally:
            gc.enable()
