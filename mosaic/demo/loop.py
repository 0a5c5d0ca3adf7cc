"""The demo's settings and its ordinary training loop, timed and recorded; nothing here colocates."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mosaic.artifact import parse, to_json
from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.clock import StreamClock, StreamMark
from mosaic.demo.data import Batch, DigitTriples, batches, load, whole
from mosaic.demo.model import SIZES, Size, TriModal, contrastive_loss
from mosaic.timeline import Span, Timeline

WARM_STEPS = 3
_Phase: TypeAlias = Literal["forward", "backward"]
_DIRECTIONS = (("image", "text"), ("text", "image"), ("image", "audio"), ("audio", "image"), ("audio", "text"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Settings of the demo and of both of its loops.

    Raises:
        ValueError: A count is below one.
    """

    kind: str
    """Kind of the device, a key of ``SIZES``."""
    seed: int = 0
    rounds: int = 12
    """Rounds of training, plain and colocated in turn."""
    steps_per_round: int = 20
    """Steps of each in a round."""
    equality_steps: int = 8
    """Steps of the comparison of losses and parameters."""
    strict: bool = False
    """Fail if other processes used the CPU, instead of marking the results."""
    batch_size: int | None = None
    """Samples in a batch; by default of the device's size."""

    def __post_init__(self) -> None:
        for name in ("rounds", "steps_per_round", "equality_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")

    @property
    def size(self) -> Size:
        return SIZES[self.kind]

    def make_model(self, device: torch.device) -> TriModal:
        """Returns the initial model of both loops."""
        torch.manual_seed(self.seed)
        return TriModal(self.size).to(device)

    def draw(self, data: DigitTriples, steps: int, device: torch.device) -> list[Batch]:
        """Returns the first batches of the run."""
        drawn = batches(data.train, self.batch_size or self.size.batch_size, self.seed, steps)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in drawn]


def train_step(model: nn.Module, batch: Batch, optimizer: Optimizer) -> float:
    loss = contrastive_loss(model(**batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Loop:
    """A model, its optimizer and its batches; every step is timed, up to the read of its loss."""

    def __init__(
        self, model: nn.Module, data: DigitTriples, settings: DemoSettings, recorder: Recorder | None = None
    ) -> None:
        self._model, self._test, self._recorder = model, data.test, recorder
        steps = WARM_STEPS + settings.rounds * settings.steps_per_round
        self._stream = iter(settings.draw(data, steps, next(model.parameters()).device))
        self._optimizer = torch.optim.AdamW(model.parameters(), settings.size.learning_rate)

    def train(self, steps: int) -> list[float]:
        """Takes training steps; returns their times in milliseconds."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            train_step(self._model, next(self._stream), self._optimizer)
            times.append((time.perf_counter() - start) * 1e3)
            if self._recorder is not None:
                self._recorder.end_step()
        return times

    def warm_up(self) -> None:
        """Takes the first steps, unrecorded."""
        self.train(WARM_STEPS)
        if self._recorder is not None:
            self._recorder.spans.clear()

    def timeline_json(self) -> str:
        """Returns the recorded steps as JSON, as from a process of its own."""
        assert self._recorder is not None
        return to_json(self._recorder.timeline())

    def retrieval(self) -> dict[str, float]:
        """Measures the share of held-out samples whose nearest sample of another modality is the right one (R@1).

        Returns:
            A share for each of ``image->text``, ``text->image``, ``image->audio``, ``audio->image`` and
            ``audio->text`` (which no loss ever compared), and ``chance``, the share by guessing.
        """
        model, was_training = self._model, self._model.training
        device = next(model.parameters()).device
        model.eval()
        with torch.no_grad():
            features = model(**{name: tensor.to(device) for name, tensor in whole(self._test).items()})
        model.train(was_training)
        right = torch.arange(len(self._test.strings), device=device)
        recall = {}
        for query, answer in _DIRECTIONS:
            nearest = (features[query] @ features[answer].T).argmax(dim=1)
            recall[f"{query}->{answer}"] = (nearest == right).double().mean().item()
        return {**recall, "chance": 1 / len(right)}


def plain_loop(settings: str) -> Loop:
    """Returns the recorded plain loop on all cores, from its settings in JSON (see ``mosaic.child``)."""
    parsed = parse(DemoSettings, settings, source="the demo's settings")
    model = parsed.make_model(torch.device("cpu"))
    return Loop(model, load(parsed.seed), parsed, Recorder(model, len(os.sched_getaffinity(0))))


class Recorder:
    """Start and end of every forward and backward of a model's children, until ``remove``.

    A backward lasts from the gradient of the module's output to the gradient of its first layer. Times are the
    device's with ``api``, else the process's.
    """

    def __init__(self, model: nn.Module, num_slots: int, *, title: str = "plain", api: StreamApi | None = None) -> None:
        self.spans: list[tuple[str, _Phase, int, Any, Any]] = []
        self._slots, self._title, self._api, self._step = tuple(range(num_slots)), title, api, 0
        self._clock = None if api is None else StreamClock(api)
        self._starts: dict[tuple[str, str], Any] = {}
        self._hooks: list[Any] = []
        for name, module in model.named_children():
            self._watch(name, module)

    def _watch(self, name: str, module: nn.Module) -> None:
        def begin(phase: _Phase) -> None:
            self._starts[name, phase] = self._now()

        def end(phase: _Phase) -> None:
            self.spans.append((name, phase, self._step, self._starts.pop((name, phase)), self._now()))

        def after_forward(_module: Any, _args: Any, output: Tensor) -> None:
            end("forward")
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(lambda _: begin("backward"))

        first_layer = next(module.children())
        self._hooks += [
            module.register_forward_pre_hook(lambda *_: begin("forward")),
            module.register_forward_hook(after_forward),
            next(first_layer.parameters()).register_post_accumulate_grad_hook(lambda _: end("backward")),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def end_step(self) -> None:
        self._step += 1
        if self._clock is not None:
            self._clock.start_step()

    def timeline(self) -> Timeline:
        """Returns the recorded spans, in milliseconds since the first start."""
        times = [(*span[:3], _at_ms(span[3]), _at_ms(span[4])) for span in self.spans]
        origin = min((start for *_, start, _ in times), default=0.0)
        times.sort(key=lambda span: span[3])
        spans = (
            Span(module=name, phase=phase, slots=self._slots, step=step, start_ms=start - origin, end_ms=end - origin)
            for name, phase, step, start, end in times
        )
        return Timeline(title=self._title, num_slots=len(self._slots), spans=tuple(spans))

    def _now(self) -> float | StreamMark:
        if self._api is None or self._clock is None:
            return time.perf_counter() * 1e3
        return self._clock.mark(self._api.current_stream())


def _at_ms(time_or_mark: float | StreamMark) -> float:
    return time_or_mark.at_ms() if isinstance(time_or_mark, StreamMark) else time_or_mark
