"""Places where two modules wait for each other, forward and backward, which they cannot do in turn."""

from __future__ import annotations

import threading
from typing import Any

import torch

from mosaic.engine.calls.thread_state import on_lane

WAIT_S = 20


class Meeting:
    """Lets two modules on lanes wait for each other while it is on; copies of a model meet where the model does.

    It has slots, so that the engine does not take it for settings of the modules that change while they run.
    """

    __slots__ = ("barrier", "meetings", "on", "phases")

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.on = False
        self.phases = ("forward", "backward")
        self.meetings: list[str] = []

    def __deepcopy__(self, memo: object) -> Meeting:
        return self

    def wait(self, where: str) -> None:
        if self.on and where in self.phases and on_lane():
            self.barrier.wait(WAIT_S)
            self.meetings.append(where)


class MeetBothWays(torch.autograd.Function):
    """Copies a tensor; waits for the other module first, in backward too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        ctx.meeting = meeting
        meeting.wait("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.meeting.wait("backward")
        return grad, None
