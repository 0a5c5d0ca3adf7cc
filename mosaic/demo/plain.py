"""The demo's timed loop, its recorder, and the process in which the plain loop runs on the host (``mosaic.child``)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.artifact import parse, to_json
from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.clock import StreamClock, StreamMark
from mosaic.child import Child
from mosaic.demo.data import Batch, DigitTriples, batches, load
from mosaic.demo.loop import retrieval, train
from mosaic.demo.model import SIZES, Size, TriModal
from mosaic.timeline import Span, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of both loops."""

    cache: Path
    """Folder of the data set."""
    seed: int
    """Seed of model, batches and dropout."""
    kind: str
    """Kind of the device, a key of ``SIZES``."""
    batch_size: int
    """Samples in a batch."""
    steps: int
    """Steps of the whole run."""

    @property
    def size(self) -> Size:
        """The model's size and learning rate."""
        return SIZES[self.kind]

    def make_model(self, device: torch.device) -> TriModal:
        """Returns the initial model of both loops."""
        torch.manual_seed(self.seed)
        return TriModal(self.size).to(device)

    def draw(self, data: DigitTriples, steps: int, device: torch.device) -> list[Batch]:
        """Returns the first batches of the run."""
        drawn = batches(data.train, self.batch_size, self.seed, steps)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in drawn]


class Loop:
    """A model, its optimizer and its batches; every step is timed, up to the read of its loss."""

    def __init__(
        self, model: nn.Module, data: DigitTriples, settings: LoopSettings, recorder: Recorder | None = None
    ) -> None:
        self._model, self._test, self._recorder = model, data.test, recorder
        device = next(model.parameters()).device
        self._stream = iter(settings.draw(data, settings.steps, device))
        self._optimizer = torch.optim.AdamW(model.parameters(), settings.size.learning_rate)

    def train(self, steps: int) -> list[float]:
        """Takes training steps; returns their times in milliseconds."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            train(self._model, [next(self._stream)], self._optimizer)
            times.append((time.perf_counter() - start) * 1e3)
            if self._recorder is not None:
                self._recorder.end_step()
        return times

    def clear_timeline(self) -> None:
        """Drops the steps recorded so far."""
        assert self._recorder is not None
        self._recorder.clear()

    def timeline(self) -> Timeline:
        """Returns the recorded steps."""
        assert self._recorder is not None
        return self._recorder.timeline()

    def retrieval(self) -> dict[str, float]:
        """Evaluates the model on held-out samples."""
        return retrieval(self._model, self._test)


class PlainProcess(Child):
    """A ``Loop`` in a process of its own; ``Child`` sets its threads' waiting."""

    def __init__(self, settings: LoopSettings, *, passive: bool) -> None:
        super().__init__("mosaic.demo.plain", json.dumps(asdict(settings), default=str), passive=passive)

    def train(self, steps: int) -> list[float]:
        """See ``Loop.train``."""
        times: list[float] = self.ask({"do": "train", "steps": steps})
        return times

    def clear_timeline(self) -> None:
        """See ``Loop.clear_timeline``."""
        self.ask({"do": "clear"})

    def timeline(self) -> Timeline:
        """See ``Loop.timeline``."""
        return parse(Timeline, json.dumps(self.ask({"do": "timeline"})), source="the plain loop")

    def retrieval(self) -> dict[str, float]:
        """See ``Loop.retrieval``."""
        shares: dict[str, float] = self.ask({"do": "retrieval"})
        return shares


class Recorder:
    """Start and end of every forward and backward of some modules; see ``recorded``.

    A backward lasts from the gradient of the module's output to the last gradient of its parameters. Times are the
    device's with ``api``, else the process's.
    """

    def __init__(self, num_slots: int, title: str, api: StreamApi | None) -> None:
        self._slots, self._title, self._api = tuple(range(num_slots)), title, api
        self._clock = None if api is None else StreamClock(api)
        self._spans: list[tuple[str, str, int, Any, Any]] = []
        self._backward: dict[str, list[tuple[Any, Any]]] = {}
        self._ends: dict[str, list[tuple[Tensor, Any]]] = {}
        self._step = 0

    def watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        """Hooks a module; yields the handles that take the hooks off."""
        start: list[Any] = []

        def after(_module: Any, _args: Any, output: Tensor) -> None:
            self._spans.append((name, "forward", self._step, start.pop(), self._now()))
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(tick)

        def tick(parameter: Any) -> None:
            self._backward.setdefault(name, []).append((self._now(), parameter))

        yield module.register_forward_pre_hook(lambda *_: start.append(self._now()))
        yield module.register_forward_hook(after)
        self._ends[name] = [(each, each.register_post_accumulate_grad_hook(tick)) for each in module.parameters()]
        for _, hook in self._ends[name]:
            yield hook

    def end_step(self) -> None:
        """Ends a training step; calls from now on belong to the next."""
        for name, times in self._backward.items():
            (start, _), (end, last) = times[0], times[-1]
            self._spans.append((name, "backward", self._step, start, end))
            for parameter, hook in self._ends.pop(name, ()):
                if parameter is not last:  # one parameter suffices from now on, and costs less
                    hook.remove()
        self._backward.clear()
        self._step += 1
        if self._clock is not None:
            self._clock.start_step()

    def clear(self) -> None:
        """Drops the recorded steps."""
        self._spans.clear()

    def timeline(self) -> Timeline:
        """Returns the recorded spans, in milliseconds since the first start."""
        times = [(*span[:3], _at_ms(span[3]), _at_ms(span[4])) for span in self._spans]
        origin = min((start for *_, start, _ in times), default=0.0)
        spans = (
            Span(
                module=name,
                phase=phase,  # type: ignore[arg-type]
                slots=self._slots,
                step=step,
                start_ms=start - origin,
                end_ms=end - origin,
            )
            for name, phase, step, start, end in sorted(times, key=lambda span: span[3])
        )
        return Timeline(title=self._title, num_slots=len(self._slots), spans=tuple(spans))

    def _now(self) -> float | StreamMark:
        if self._api is None or self._clock is None:
            return time.perf_counter() * 1e3
        return self._clock.mark(self._api.current_stream())


def _at_ms(time_or_mark: float | StreamMark) -> float:
    return time_or_mark.at_ms() if isinstance(time_or_mark, StreamMark) else time_or_mark


@contextmanager
def recorded(
    modules: Mapping[str, nn.Module], num_slots: int, *, title: str = "plain", api: StreamApi | None = None
) -> Iterator[Recorder]:
    """Records modules of a plain run inside the block; call ``end_step`` after every optimizer step."""
    recorder = Recorder(num_slots, title, api)
    with ExitStack() as hooks:
        for name, module in modules.items():
            for handle in recorder.watch(name, module):
                hooks.callback(handle.remove)
        yield recorder


def _serve(settings: LoopSettings) -> None:
    """Body of the process: trains, records or evaluates on request."""
    model = settings.make_model(torch.device("cpu"))
    with recorded(dict(model.named_children()), len(os.sched_getaffinity(0))) as recorder:
        loop = Loop(model, load(settings.cache, seed=settings.seed), settings, recorder)
        for line in sys.stdin:
            request = json.loads(line)
            answer: Any
            if request["do"] == "train":
                answer = loop.train(request["steps"])
            elif request["do"] == "retrieval":
                answer = loop.retrieval()
            elif request["do"] == "timeline":
                answer = json.loads(to_json(loop.timeline()))
            else:
                loop.clear_timeline()
                answer = None
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    _serve(LoopSettings(**{**given, "cache": Path(given["cache"])}))
