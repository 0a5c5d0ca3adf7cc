"""The step of two modules on any variant: launched or captured, timed from its beginning to the end of both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mosaic.backends.base import Mark, Ticket
from mosaic.backends.streams.lanes import StreamLane
from mosaic.errors import BackendUnavailableError
from mosaic.microbench.sharing.variants import Variant
from mosaic.profiler import Subject


@dataclass(frozen=True, slots=True)
class TwoModules:
    """Two independent modules."""

    first: Subject
    """Runs on the first lane."""
    second: Subject
    """Runs on the second lane."""
    backward: bool
    """A step includes backward."""

    @property
    def both(self) -> tuple[Subject, Subject]:
        """Both, in order."""
        return self.first, self.second


class EagerSteps:
    """Steps that are launched operator by operator: both forwards, then both backwards."""

    def __init__(self, variant: Variant, modules: TwoModules) -> None:
        self._variant = variant
        self._modules = modules

    def run(self, count: int) -> tuple[float, ...]:
        """Runs steps one after the other; returns the milliseconds of each."""
        lane = self._variant.both[0]
        marks = [lane.submit(lane.mark)]
        kept: list[Ticket[Any]] = []
        for _ in range(count):
            tickets = self._one(marks[-1])
            marks.append(lane.submit(lane.mark, after=tickets))
            kept += tickets  # tickets hold no outputs and no graphs
        for ticket in kept:
            ticket.wait()
        return intervals([mark.wait() for mark in marks])

    def _one(self, start: Ticket[Any]) -> list[Ticket[Any]]:
        pairs = list(zip(self._variant.both, self._modules.both, strict=True))
        if not self._modules.backward:
            return [lane.submit(partial(_whole, module, False), after=[start]) for lane, module in pairs]
        forwards = [lane.submit(module.forward, after=[start]) for lane, module in pairs]
        return [
            lane.submit(partial(_backward, module, forward))
            for (lane, module), forward in zip(pairs, forwards, strict=True)
        ]


def _backward(module: Subject, forward: Ticket[list[torch.Tensor]]) -> None:
    module.backward(forward.wait())  # the forward ran on this lane before


def _whole(module: Subject, backward: bool) -> None:
    outputs = module.forward()
    if backward:
        module.backward(outputs)


class CapturedSteps:
    """Steps that are one CUDA graph each: it forks to the second lane's stream and joins again.

    Kernels keep the partition of the stream on which they were captured, wherever the graph is launched.

    Raises:
        BackendUnavailableError: The lanes are not streams, or the modules cannot be captured.
    """

    def __init__(self, variant: Variant, modules: TwoModules) -> None:
        streams = variant.lanes.streams
        if streams is None:
            raise BackendUnavailableError(
                "steps cannot be captured", found="lanes that are threads", needed="lanes on CUDA streams"
            )
        first, second = (streams.lane(lane.slots) for lane in variant.both)
        self._lane, self._other = first, second
        self._graph = first.api.new_graph()
        try:
            self._capture(first, second, modules)
        except RuntimeError as error:
            raise BackendUnavailableError(
                "the modules cannot be captured",
                found=str(error).partition("\n")[0],
                needed="modules that neither wait for the device nor change shapes",
            ) from error

    def _capture(self, first: StreamLane, second: StreamLane, modules: TwoModules) -> None:
        api = first.api
        for lane, module in zip((first, second), modules.both, strict=True):  # libraries set themselves up here
            for _ in range(2):
                lane.submit(partial(_whole, module, modules.backward)).wait()
        api.synchronize()
        api.release_workspaces()  # cuBLAS workspaces from outside may be freed while the graph uses them
        with api.capture(self._graph, stream=first.stream, pool=api.new_graph_pool()):
            if second is not first:
                fork = api.new_event()
                fork.record(first.stream)
                fork.wait(second.stream)
            _whole(modules.first, modules.backward)
            with api.use_stream(second.stream):
                _whole(modules.second, modules.backward)
            if second is not first:
                join = api.new_event()
                join.record(second.stream)
                join.wait(first.stream)
        api.release_workspaces()

    def run(self, count: int) -> tuple[float, ...]:
        """Runs steps one after the other; returns the milliseconds of each."""
        lane = self._lane

        def replay() -> list[Mark]:
            marks: list[Mark] = [lane.mark()]
            for _ in range(count):
                self._graph.replay()
                marks.append(lane.mark())
            return marks

        return intervals(lane.submit(replay).wait())

    def close(self) -> None:
        """Releases the graph's memory after both streams have passed its last launch."""
        self._other.submit(lambda: None, after=[self._lane.submit(lambda: None)]).wait()
        self._lane.api.synchronize()
        self._graph.reset()


def intervals(marks: Sequence[Mark]) -> tuple[float, ...]:
    """Returns the milliseconds between neighbouring marks."""
    return tuple(before.ms_until(after) for before, after in itertools.pairwise(marks))
