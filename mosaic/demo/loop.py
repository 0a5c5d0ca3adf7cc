"""The demo's settings and its ordinary training loop, timed and recorded."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mosaic.artifact import parse, to_json
from mosaic.demo.data import Batch, DigitTriples, batches, load, whole
from mosaic.demo.model import SIZES, Size, TriModal, contrastive_loss
from mosaic.timeline import Span, Timeline

WARM_STEPS = 3
_Phase: TypeAlias = Literal["forward", "backward"]
_DIRECTIONS = (("image", "text"), ("text", "image"), ("image", "audio"), ("audio", "image"), ("audio", "text"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    kind: str
    """Kind of the device, a key of ``SIZES``."""
    seed: int = 0
    rounds: int = 12
    """Rounds of training, plain and colocated in turn."""
    steps_per_round: int = 20
    equality_steps: int = 8
    """Steps of the comparison of losses and parameters."""
    strict: bool = False
    """Fail if other processes used the CPU, instead of marking the results."""

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
        drawn = batches(data.train, self.size.batch_size, self.seed, steps)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in drawn]


def train_step(model: nn.Module, batch: Batch, optimizer: Optimizer) -> float:
    loss = contrastive_loss(model(**batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Loop:
    """A model, its optimizer and its batches; every step is timed, up to the read of its loss.

    With ``num_slots`` it records the forwards and backwards of the model's children, by the device's clock. A backward
    lasts from the gradient of the module's output to the gradient of its first layer.
    """

    def __init__(self, model: TriModal, data: DigitTriples, settings: DemoSettings, num_slots: int = 0) -> None:
        self._model, self._test = model, data.test
        device = next(model.parameters()).device
        self._batches = iter(settings.draw(data, WARM_STEPS + settings.rounds * settings.steps_per_round, device))
        self._optimizer = torch.optim.AdamW(model.parameters(), settings.size.learning_rate)
        self._slots, self._on_cuda, self._step = tuple(range(num_slots)), device.type == "cuda", 0
        self._origin = self._now()
        self._begun: dict[tuple[str, str], Any] = {}
        self._recorded: list[tuple[str, _Phase, int, Any, Any]] = []
        if num_slots:
            for name, module in model.named_children():
                self._watch(name, module)

    def train(self, steps: int) -> list[float]:
        """Takes training steps; returns their times in milliseconds."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            train_step(self._model, next(self._batches), self._optimizer)
            times.append((time.perf_counter() - start) * 1e3)
            self._step += 1
        return times

    def warm_up(self) -> None:
        """Takes the first steps, unrecorded."""
        self.train(WARM_STEPS)
        self._recorded.clear()
        self._origin = self._now()

    def retrieval(self) -> dict[str, float]:
        """Returns the share of held-out samples whose nearest sample of another modality is the right one (R@1).

        The share has the name of its direction, such as ``audio->text``, which no loss compares.
        """
        model = self._model.eval()
        device = next(model.parameters()).device
        with torch.no_grad():
            features = model(**{name: tensor.to(device) for name, tensor in whole(self._test).items()})
        model.train()
        right = torch.arange(len(self._test.strings), device=device)
        recall = {}
        for query, answer in _DIRECTIONS:
            nearest = (features[query] @ features[answer].T).argmax(dim=1)
            recall[f"{query}->{answer}"] = (nearest == right).double().mean().item()
        return recall

    def timeline(self, title: str) -> Timeline:
        if self._on_cuda:
            torch.cuda.synchronize()
        spans = [
            Span(module=name, phase=phase, slots=self._slots, step=step, start_ms=self._ms(start), end_ms=self._ms(end))
            for name, phase, step, start, end in self._recorded
        ]
        spans.sort(key=lambda span: span.start_ms)
        return Timeline(title=title, num_slots=len(self._slots), spans=tuple(spans))

    def timeline_json(self, title: str) -> str:
        return to_json(self.timeline(title))

    def _watch(self, name: str, module: nn.Module) -> None:
        def begin(phase: _Phase) -> None:
            self._begun[name, phase] = self._now()

        def end(phase: _Phase) -> None:
            self._recorded.append((name, phase, self._step, self._begun.pop((name, phase)), self._now()))

        def after_forward(_module: Any, _args: Any, output: Tensor) -> None:
            end("forward")
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(lambda _: begin("backward"))

        first_parameter = next(next(module.children()).parameters())
        module.register_forward_pre_hook(lambda *_: begin("forward"))
        module.register_forward_hook(after_forward)
        first_parameter.register_post_accumulate_grad_hook(lambda _: end("backward"))

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, moment: Any) -> float:
        """Returns the milliseconds since the end of the first steps."""
        elapsed = self._origin.elapsed_time(moment) if self._on_cuda else (moment - self._origin) * 1e3
        return float(elapsed)


def plain_loop(settings: str) -> Loop:
    """Returns the recorded plain loop on all cores, from its settings in JSON (see ``mosaic.child``)."""
    parsed = parse(DemoSettings, settings, source="the demo's settings")
    model = parsed.make_model(torch.device("cpu"))
    return Loop(model, load(parsed.seed), parsed, len(os.sched_getaffinity(0)))
