"""The times of modules on streams: timed events, read long after they were recorded, so that no step waits for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mosaic.backends.streams.clock import StreamMark
from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.placed_module import LastGradients
from mosaic.engine.calls.ranges import ProfilerRange
from mosaic.find.structure import tensors_in
from mosaic.timeline import Span

if TYPE_CHECKING:
    from mosaic.backends.streams.api import StreamApi
    from mosaic.backends.streams.clock import StreamClock
    from mosaic.engine.calls.placed_module import PlacedModule

_MAX_SPANS = 20_000
_MAX_PENDING = 512


class StreamTimeline:
    """Forwards and backwards of placed modules.

    A backward lasts from the first gradient of the module's results to the gradient of its first parameter, or, where
    it trains none, to that of an input.
    """

    def __init__(self, api: StreamApi, clock: StreamClock, begins: Callable[[], object] = lambda: None) -> None:
        self.num_backwards = 0  # that came through placed modules
        self._clock = clock
        self._begins = begins  # called when one begins
        self._api = api
        self._task = -1
        self._in_step: set[tuple[str, str]] = set()
        self._known: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._pending: deque[tuple[PlacedModule, str, int, StreamMark, Any]] = deque()
        self._reading = threading.Lock()
        self._running: dict[str, _Backward] = {}
        self._ends = LastGradients()

    def mark(self) -> StreamMark:
        """Notes the point that the current stream has come to; autograd's is that of the node that it is running."""
        return self._clock.mark(self._api.current_stream())

    def note(self, site: PlacedModule, phase: str, start: StreamMark, end: Any, *, step: int | None = None) -> None:
        """Notes a piece of a module's work between a mark and an event; of the present step by default.

        A new step begins for the clock when work of the present one comes again.
        """
        if self.is_captured:
            return
        if (site.name, phase) in self._in_step:
            self._in_step.clear()
            self._clock.start_step()
        self._in_step.add((site.name, phase))
        self._pending.append((site, phase, self.num_backwards if step is None else step, start, end))
        if len(self._pending) > _MAX_PENDING:
            self._read(wait=False)

    def watch_backward(self, site: PlacedModule, result: Any, inputs: Sequence[torch.Tensor]) -> None:
        """Prepares to see the backward of a call, if it will have one."""
        if not torch.is_grad_enabled():
            return
        results = [tensor for tensor in tensors_in(result) if tensor.requires_grad and not tensor.is_leaf]
        if not results:
            return
        backward = _Backward(self, site)
        for tensor in results:
            tensor.register_hook(backward.begin)
        if not self._ends.watch(site, partial(self._end, site.name)):
            for tensor in inputs:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: backward.end())

    def spans(self) -> tuple[Span, ...]:
        """Returns what ran since the lanes were opened; waits for it."""
        self._read(wait=True)
        return tuple(sorted(self._known, key=lambda span: span.start_ms))

    def clear(self) -> None:
        self._read(wait=False)  # so that the clock forgets the events of the steps
        self._known.clear()
        self._pending.clear()

    def close(self) -> None:
        """Reads what is left, and takes the hooks off the parameters."""
        self._read(wait=True)
        self._ends.close()

    def began(self, backward: _Backward) -> None:
        """Called by the first gradient of a module's results."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.num_backwards += 1
            self._begins()
        self._running[backward.site.name] = backward

    @property
    def is_captured(self) -> bool:
        """Returns True if the current stream is being captured by the user, so that its events have no times."""
        return self._api.is_capturing()

    def _end(self, module: str) -> None:
        if module in self._running:
            self._running.pop(module).end()

    def _read(self, *, wait: bool) -> None:
        with self._reading:
            while self._pending and (wait or self._pending[0][-1].query()):
                site, phase, step, start, end = self._pending.popleft()
                assert isinstance(site.lane, StreamLane)
                end.synchronize()
                start_ms = site.lane.origin.ms_until(start)
                end_ms = start_ms + max(0.0, start.event.elapsed_time(end))
                self._known.append(
                    Span(
                        module=site.name,
                        phase=phase,  # type: ignore[arg-type]
                        slots=site.lane.slots,
                        step=step,
                        start_ms=start_ms,
                        end_ms=end_ms,
                    )
                )


class _Backward:
    """One backward of one call; refers to no tensor, since tensors' hooks refer to it."""

    def __init__(self, timeline: StreamTimeline, site: PlacedModule) -> None:
        self.site = site
        self._step = timeline.num_backwards
        self._timeline = timeline
        self._task = -1
        self._start: StreamMark | None = None
        self._target: ExitStack | None = None
        self._shown: ProfilerRange | None = None

    def begin(self, _: torch.Tensor) -> None:
        if self._timeline.is_captured:
            return
        task = torch._C._current_graph_task_id()
        if self._start is None or self._task != task:  # an earlier backward may have come to no end
            self._task, self._start = task, self._timeline.mark()
            self._timeline.began(self)
            self._shown = ProfilerRange(self.site.name, "backward")
            lane = self.site.lane
            if isinstance(lane, StreamLane) and lane.libraries is not None and not self.site.is_alone:
                with lane.api.use_stream(lane.stream):  # whose workspace of cuBLAS there is
                    self._target = lane.libraries.begin_backward(lane.num_sms)

    def end(self) -> None:
        if self._start is not None:
            if self._shown is not None:
                self._shown.close()
            end = self._timeline.mark().event
            self._timeline.note(self.site, "backward", self._start, end, step=self._step)
            self._start = None
        if self._target is not None:
            self._target.close()
