"""The demo's settings and its ordinary training loop, timed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.artifact import parse
from mosaic.demo.data import Batch, DigitTriples, batches, load, whole
from mosaic.demo.model import SIZES, Size, TriModal, contrastive_loss

WARM_STEPS = 3
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
    """A model, its optimizer and its batches; every step is timed, up to the read of its loss."""

    def __init__(self, model: TriModal, data: DigitTriples, settings: DemoSettings) -> None:
        self._model, self._test = model, data.test
        device = next(model.parameters()).device
        self._batches = iter(settings.draw(data, WARM_STEPS + settings.rounds * settings.steps_per_round, device))
        self._optimizer = torch.optim.AdamW(model.parameters(), settings.size.learning_rate)

    def train(self, steps: int) -> list[float]:
        """Takes training steps; returns their times in milliseconds."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            train_step(self._model, next(self._batches), self._optimizer)
            times.append((time.perf_counter() - start) * 1e3)
        return times

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


def plain_loop(settings: str) -> Loop:
    """Returns the plain loop on all cores, from its settings in JSON (see ``mosaic.child``)."""
    parsed = parse(DemoSettings, settings, source="the demo's settings")
    return Loop(parsed.make_model(torch.device("cpu")), load(parsed.seed), parsed)
