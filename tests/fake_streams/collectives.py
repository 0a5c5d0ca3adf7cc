"""NCCL's collectives over gloo: each communicator has a stream of its own, and only ``wait`` orders others after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fake_streams.clocks import Clock, merge
from fake_streams.runtime import FakeStream, FakeStreams


@dataclass(frozen=True)
class Issued:
    """One collective, when it was launched."""

    kind: str
    communicator: str
    stream: int
    """The stream that was current then."""
    in_backward: bool


class FakeWork:
    def __init__(self, runtime: FakeStreams, work: dist.Work, clock: Clock) -> None:
        self._runtime = runtime
        self._work = work
        self._clock = clock

    def wait(self) -> bool:
        self._work.wait()  # there is no other way to have the values here
        merge(self._runtime.current_stream().clock, self._clock)
        return True


class FakeNccl:
    """Replaces the collectives that move tensors of the device, inside of ``standing_in()``.

    Attributes:
        issued: What was launched, in order.
    """

    def __init__(self, runtime: FakeStreams) -> None:
        self.issued: list[Issued] = []
        self._runtime = runtime
        self._streams: dict[str, FakeStream] = {}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        all_to_all, all_reduce, broadcast = dist.all_to_all_single, dist.all_reduce, dist.broadcast

        def moved(
            made: torch.Tensor, given: torch.Tensor, *splits: Any, group: Any = None, async_op: bool = False
        ) -> FakeWork | None:
            def begin() -> dist.Work:
                return all_to_all(made, given, *splits, group=group, async_op=True)

            return self._run("all_to_all", group, [given], [made], begin, async_op)

        def reduced(
            tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> FakeWork | None:
            def begin() -> dist.Work:
                return all_reduce(tensor, op, group, async_op=True)

            return self._run("all_reduce", group, [], [tensor], begin, async_op)

        def told(
            tensor: torch.Tensor, src: int | None = None, group: Any = None, async_op: bool = False
        ) -> FakeWork | None:
            def begin() -> dist.Work:
                return broadcast(tensor, src, group, async_op=True)

            return self._run("broadcast", group, [], [tensor], begin, async_op)

        with mock.patch.multiple(dist, all_to_all_single=moved, all_reduce=reduced, broadcast=told):
            yield

    def _run(
        self,
        kind: str,
        group: Any,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        begin: Callable[[], dist.Work],
        async_op: bool,
    ) -> FakeWork | None:
        runtime, name = self._runtime, (group or dist.group.WORLD).group_name
        here = runtime.current_stream()
        self.issued.append(Issued(kind, name, here.handle, runtime.in_backward()))
        if name not in self._streams:
            self._streams[name] = runtime.new_aside()
        stream = self._streams[name]
        merge(stream.clock, here.clock)
        with runtime.use_stream(stream):
            runtime.launch(kind, list(reads), list(writes))
        work = FakeWork(runtime, begin(), dict(stream.clock))
        if async_op:
            return work
        work.wait()
        return None
