"""How the lanes of a rank do their actions: in turn on one thread, each on a thread of its own, or on streams."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from mosaic.backends.base import Lane, Lanes
from mosaic.backends.streams.lanes import StreamLane, StreamLanes, StreamTicket
from mosaic.engine.calls.thread_state import ThreadState, forget_cast_weights, interception
from mosaic.ranks.pipeline.executing.program import BACKWARD, FORWARD, REDUCE, WEIGHTS
from mosaic.ranks.pipeline.executing.step_run import StepRun

_COMPUTES = (FORWARD, BACKWARD, WEIGHTS, REDUCE)


class LaneWay(Protocol):
    """A way for the lanes of a rank to do their actions."""

    def go(self, run: StepRun) -> None:
        """Does all actions of a step.

        Raises:
            BaseException: The first thing that an action raised.
        """


class InTurn:
    """One thread does what all lanes do, in an order that suits them all."""

    def go(self, run: StepRun) -> None:
        """Does all actions; see ``LaneWay``."""
        at = [0] * len(run.program.rows)
        for lane in run.program.order:
            run.do(lane, at[lane])
            at[lane] += 1


class OnThreads:
    """Each lane on a thread of its own, pinned to its cores: one that waits does not hold the others up.

    A step in which one lane alone has something to do, such as one without images, runs on the calling thread, with all
    cores. So does one that torch modes of that thread watch, such as a counter of operators: they do not see others.

    Args:
        lanes: Open lanes.
        of_row: For each row of the rank its lane.
    """

    def __init__(self, lanes: Lanes, of_row: Sequence[Lane]) -> None:
        self._lanes, self._of_row = lanes, tuple(of_row)

    def go(self, run: StepRun) -> None:
        """Does all actions; see ``LaneWay``."""
        if _has_one_lane(run) or interception() is not None:
            InTurn().go(run)
            return
        state = ThreadState.capture()
        for number, lane in enumerate(self._of_row):
            lane.submit(partial(_walk, run, number, state))
        try:
            self._lanes.drain()
        except BaseException as error:  # such as KeyboardInterrupt: lanes must not go on without their caller
            run.fail("the wait for its lanes", error)
            self._lanes.drain()
        forget_cast_weights()
        if run.failure is not None:
            raise run.failure


def _has_one_lane(run: StepRun) -> bool:
    return sum(map(bool, run.program.rows)) < 2


def _walk(run: StepRun, lane: int, state: ThreadState) -> None:
    """Does what one lane does, on the present thread."""
    with state.applied():
        for at, (code, place, _, _) in enumerate(run.program.rows[lane]):
            if code in _COMPUTES and place in run.program.after:
                run.await_others(place)
            run.do(lane, at)


class OnStreams:
    """One thread launches all lanes' actions, each on the stream of its lane; streams wait for each other by events.

    Autograd runs a backward on the streams of its forward, so each task stays on its lane's SMs. A step in which one
    lane alone has something to do runs on the caller's stream, with all SMs. Not tried on GPUs.

    Args:
        lanes: Open lanes.
        of_row: For each row of the rank its lane.
    """

    def __init__(self, lanes: StreamLanes, of_row: Sequence[StreamLane]) -> None:
        self._lanes, self._of_row = lanes, tuple(of_row)

    def go(self, run: StepRun) -> None:
        """Launches all actions; see ``LaneWay``. The caller's stream then waits for them, and no thread does."""
        if _has_one_lane(run):
            InTurn().go(run)
            return
        for lane in self._of_row:
            lane.order_after_caller()
        at = [0] * len(self._of_row)
        made: dict[int, StreamTicket[None]] = {}
        try:
            for number in run.program.order:
                self._launch(run, number, at[number], made)
                at[number] += 1
        finally:
            self._lanes.join()

    def _launch(self, run: StepRun, number: int, at: int, made: dict[int, StreamTicket[None]]) -> None:
        lane, (code, place, _, _) = self._of_row[number], run.program.rows[number][at]
        if code not in _COMPUTES:
            with lane.api.use_stream(lane.stream):
                run.do(number, at)
            return
        after = [made[one] for one in run.program.after.get(place, ())]
        for tensor in run.given(place) if after else ():
            lane.api.record_use(tensor, lane.stream)
        ticket = lane.launch(partial(run.do, number, at), after=after, behind_caller=False, timed=False)
        if place >= 0:
            made[place] = ticket
