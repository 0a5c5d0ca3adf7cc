"""Variants of running two pieces of work concurrently, and the step of two modules on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mosaic.backends.base import Backend, Lane, Lanes, Mark, Ticket
from mosaic.backends.streams.lanes import StreamLane
from mosaic.errors import BackendUnavailableError, CudaError
from mosaic.profiler import Subject

QuotaPair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Variant:
    """Two open lanes of one kind."""

    name: str
    kind: str
    lanes: Lanes
    """Owner of the lanes, to be closed."""
    both: tuple[Lane, Lane]
    """Both lanes; the same lane twice for sequential work."""
    quotas: QuotaPair | None = None
    """Slots of each; None if unlimited."""
    note: str = ""


def parts_of(quotas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the slots of adjacent partitions of these sizes, from slot 0."""
    ends = itertools.accumulate(quotas)
    return tuple(tuple(range(end - quota, end)) for quota, end in zip(quotas, ends, strict=True))


def open_variant(kind: str, backend: Backend, split: QuotaPair) -> Variant:
    """Opens two lanes of a kind, with the slots ``split`` if the kind confines them.

    Args:
        kind: One of ``sequential``, ``plain``, ``prioritised`` and ``partitions``.

    Raises:
        BackendUnavailableError: The kind is unavailable.
    """
    all_slots, parts = backend.device.slots, parts_of(split)
    if kind == "sequential":
        try:
            lanes, note = backend.open_plain_lanes([all_slots]), "one plain stream with all SMs"
        except BackendUnavailableError:
            lanes, note = backend.open_lanes([all_slots]), "one lane with all slots"
        return Variant("one after the other", kind, lanes, (lanes.lane(all_slots), lanes.lane(all_slots)), note=note)
    quotas, name, note = None, f"{kind} streams", "two streams with all SMs"
    if kind == "partitions":
        lanes, quotas, name, note = backend.open_lanes(parts), split, f"partitions {split[0]}+{split[1]}", ""
    elif kind == "plain":
        lanes = backend.open_plain_lanes(parts)
    else:
        lanes, note = backend.open_plain_lanes(parts, priorities=(-1, 0)), f"{note}, the first with priority"
    return Variant(name, kind, lanes, (lanes.lane(parts[0]), lanes.lane(parts[1])), quotas, note)


UNAVAILABLE = (BackendUnavailableError, CudaError)
"""Errors of an unavailable variant."""


class EagerSteps:
    """Steps of two independent modules, launched by operator: both forwards, then both backwards."""

    def __init__(self, variant: Variant, modules: Sequence[Subject], *, backward: bool) -> None:
        self._pairs = list(zip(variant.both, modules, strict=True))
        self._backward = backward

    def run(self, count: int) -> tuple[float, ...]:
        """Runs steps one after the other; returns the milliseconds of each."""
        lane = self._pairs[0][0]
        marks = [lane.submit(lane.mark)]
        tickets: list[Ticket[Any]] = []
        for _ in range(count):
            forwards = [lane.submit(module.forward, after=marks[-1:]) for lane, module in self._pairs]
            ends: list[Ticket[Any]] = [
                lane.submit(partial(_end_step, module, forward, backward=self._backward))
                for (lane, module), forward in zip(self._pairs, forwards, strict=True)
            ]
            marks.append(lane.submit(lane.mark, after=ends))
            tickets += ends  # so that tickets do not hold outputs and graphs
        for ticket in tickets:
            ticket.wait()
        return intervals([mark.wait() for mark in marks])

    def close(self) -> None:
        pass


def _end_step(module: Subject, forward: Ticket[list[torch.Tensor]], *, backward: bool) -> None:
    outputs = forward.wait()  # it already ran on this lane
    if backward:
        module.backward(outputs)


class CapturedSteps:
    """Steps of two modules, each captured as one CUDA graph that forks to the second lane's stream and joins.

    Kernels keep the partition of their capture stream when the graph is launched on another.

    Raises:
        BackendUnavailableError: The lanes are not streams, or the modules cannot be captured.
    """

    def __init__(self, variant: Variant, modules: Sequence[Subject], *, backward: bool) -> None:
        streams = variant.lanes.streams
        if streams is None:
            raise BackendUnavailableError(
                "steps cannot be captured", found="lanes that are threads", needed="lanes on CUDA streams"
            )
        self._lane, self._other = first, second = [streams.lane(lane.slots) for lane in variant.both]
        works = [partial(_run, module, backward=backward) for module in modules]
        self._graph = first.api.new_graph()
        try:
            self._capture(first, second, works)
        except RuntimeError as error:
            raise BackendUnavailableError(
                "the modules cannot be captured",
                found=str(error).partition("\n")[0],
                needed="modules without synchronization or changing shapes",
            ) from error

    def _capture(self, first: StreamLane, second: StreamLane, works: Sequence[Callable[[], None]]) -> None:
        api = first.api

        def order(earlier: StreamLane, later: StreamLane) -> None:
            if earlier is not later:
                event = api.new_event()
                event.record(earlier.stream)
                event.wait(later.stream)

        for lane, work in zip((first, second), works, strict=True):  # initializes libraries
            for _ in range(2):
                lane.submit(work).wait()
        api.synchronize()
        api.release_workspaces()  # cuBLAS workspaces from outside may be freed while the graph uses them
        with api.capture(self._graph, stream=first.stream, pool=api.new_graph_pool()):
            order(first, second)
            works[0]()
            with api.use_stream(second.stream):
                works[1]()
            order(second, first)
        api.release_workspaces()

    def run(self, count: int) -> tuple[float, ...]:
        lane = self._lane

        def replay() -> list[Mark]:
            marks: list[Mark] = [lane.mark()]
            for _ in range(count):
                self._graph.replay()
                marks.append(lane.mark())
            return marks

        return intervals(lane.submit(replay).wait())

    def close(self) -> None:
        """Releases the graph's memory after its last launch on both streams."""
        self._other.submit(lambda: None, after=[self._lane.submit(lambda: None)]).wait()
        self._lane.api.synchronize()
        self._graph.reset()


def _run(module: Subject, *, backward: bool) -> None:
    outputs = module.forward()
    if backward:
        module.backward(outputs)


def intervals(marks: Sequence[Mark]) -> tuple[float, ...]:
    """Returns the milliseconds between successive marks."""
    return tuple(before.ms_until(after) for before, after in itertools.pairwise(marks))
