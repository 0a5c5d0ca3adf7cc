"""Ways to go on when tasks change: the plain loop, planning anew, a new start from a checkpoint, and the first plan."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mosaic
from bench.changing.workload import Scale, make_optimizer
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import Options, TrialSettings
from mosaic.models import loss_of
from mosaic.profiler import ProfileSettings

Batch = Mapping[str, Any]


class OwnClock:
    """Runs while its way does: what the others take in between is no part of a trial's steps."""

    def __init__(self) -> None:
        self._passed_ms = 0.0
        self._since: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block that takes time."""
        self._since = time.perf_counter()
        yield
        self._passed_ms, self._since = self.mark(), None

    def mark(self) -> float:
        """Returns the time that has passed, in milliseconds."""
        return self._passed_ms + (0.0 if self._since is None else (time.perf_counter() - self._since) * 1e3)

    def is_past(self, mark: float) -> bool:
        """A mark on the host is always past."""
        return True

    def ms_between(self, earlier: float, later: float) -> float:
        """Returns what passed between two marks."""
        return later - earlier

    def settle(self) -> None:
        """Does nothing: the host has nothing under way."""


class Plain:
    """The loop without Mosaic: a change takes no time.

    Args:
        scale: The model, and how carefully to profile.
        first: A batch of the first phase.

    Attributes:
        loss: Of the last step.
    """

    name = "the plain loop"

    def __init__(self, scale: Scale, first: Batch) -> None:
        self.scale = scale
        self.model = scale.make_model()
        self.optimizer = make_optimizer(self.model)
        self.loss = 0.0
        self.parts: dict[str, float] = {}
        self.clock = OwnClock()
        self.begin(first)

    def begin(self, batch: Batch) -> None:
        """Gets ready for the first phase."""

    def change(self, batch: Batch) -> None:
        """Goes on to a phase; ``parts`` has what that took, in milliseconds."""
        self.parts = {}

    def step_ms(self, batch: Batch) -> float:
        """Takes one training step."""
        began = self.clock.mark()
        with self.clock.running():
            loss = loss_of(self.model(**batch))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.loss = loss.item()
        return self.clock.mark() - began

    @property
    def trial_lost_ms(self) -> float:
        """What trying plans lost; nothing is tried."""
        return 0.0

    def close(self) -> None:
        """Ends it."""


class FirstPlan(Plain):
    """What the first phase's plan makes of all: modules that it does not know, or that get other rows, run in place."""

    name = "the first plan"
    cache: Path | None = None

    def begin(self, batch: Batch) -> None:
        """Colocates the model."""
        careful = ProfileSettings(sample_seconds=self.scale.sample_seconds, foreign_share=2.0)
        options = Options(cache=self.cache, profiling=careful, trial=TrialSettings(clock=self.clock))
        self.handle = mosaic.colocate(self.model, sample=dict(batch), backend=HostBackend(), options=options)
        self._note_setup()

    @property
    def trial_lost_ms(self) -> float:
        """What the trials since the last change lost."""
        return self.handle.metrics().get("trial_lost_ms", 0.0)

    def close(self) -> None:
        """Takes the model off the lanes."""
        self.handle.remove()

    def _note_setup(self) -> None:
        found = self.handle.metrics()
        self.parts |= {name.removeprefix("setup_ms/"): ms for name, ms in found.items() if name.startswith("setup_ms/")}


class PlannedAnew(FirstPlan):
    """``handle.replan`` at each change; no measurement is kept on the disk."""

    name = "replan"

    def change(self, batch: Batch) -> None:
        """Plans anew."""
        self.parts = {}
        with _timed(self.parts, "in all"):
            self.handle.replan(dict(batch), reason="the tasks changed", optimizer=self.optimizer)
        self._note_setup()


class NewStart(FirstPlan):
    """Spindle's way: the model is saved, made anew, and loaded; measurements are kept in a folder, as by default."""

    name = "a new start"

    def __init__(self, scale: Scale, first: Batch) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.cache = Path(self._folder.name) / "profiles"
        self._step = 0
        super().__init__(scale, first)

    def change(self, batch: Batch) -> None:
        """Saves, makes the model, colocates and loads it."""
        self.parts = {}
        self._step += 1
        place = Path(self._folder.name) / "checkpoints"
        with _timed(self.parts, "in all"):
            with _timed(self.parts, "save"):
                self.handle.save(place, step=self._step, optimizer=self.optimizer, keep=1)
                self.handle.finish_saving()
                self.handle.remove()
            with _timed(self.parts, "make"):
                self.model = self.scale.make_model()
                self.optimizer = make_optimizer(self.model)
            self.begin(batch)
            with _timed(self.parts, "load"):
                self.handle.load(place, optimizer=self.optimizer)

    def close(self) -> None:
        """Takes the model off the lanes, and removes what was saved."""
        super().close()
        self._folder.cleanup()


WAYS = (Plain, PlannedAnew, NewStart, FirstPlan)
"""The plain loop first: the others are compared with it."""


@contextmanager
def _timed(parts: dict[str, float], part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    parts[part] = parts.get(part, 0.0) + (time.perf_counter() - began) * 1e3
