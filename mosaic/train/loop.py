"""The loop of a day: it can be killed at any instant, and goes on with the same bits.

A step is a function of the state before it, of its positions in the stream, and of (seed, step, micro-batch): every
random number is drawn under these. So the state that is kept is the model's, the optimizers', and one step number.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mosaic.checkpoint.folder import drop_old
from mosaic.checkpoint.methods import KeepsCheckpoints
from mosaic.errors import MosaicError
from mosaic.lines import append_line
from mosaic.train.crew import Crew
from mosaic.train.program import Program
from mosaic.train.seeds import StepSeeds
from mosaic.train.signals import StopRequests

_LOG = logging.getLogger(__name__)
MAX_STEPS_NOT_FINITE = 20
"""Steps in a row whose loss is infinite or no number, after which a day fails; a scaler skips a few."""
WINDOW_OVER = "window over"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What a loop is told."""

    num_steps: int
    """Steps of the day."""
    seed: int
    """Of everything that is drawn."""
    save_s: float
    """Seconds between checkpoints."""
    keep: int
    """Checkpoints that stay."""
    until: float | None
    """When the training has to end, as ``time.monotonic()`` counts; None for never."""
    checkpoints: Path
    """The day's checkpoints."""
    metrics: Path | None
    """``metrics.jsonl``; None on all ranks but the first."""
    log_every: int = 1
    """Steps between two lines of it."""


@dataclass(slots=True)
class Trainee:
    """What is trained: a model with all that belongs to it."""

    model: nn.Module
    """In place, colocated or not."""
    keeper: KeepsCheckpoints
    """Its handle."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """At least one."""
    schedulers: tuple[Any, ...]
    """Stepped once a step."""
    scaler: Any
    """A GradScaler, or None."""
    companions: Mapping[str, nn.Module]
    """Kept beside the model, such as an average of its weights."""

    @property
    def belongings(self) -> dict[str, Any]:
        """What ``save`` and ``load`` take."""
        return {
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "scaler": self.scaler,
            "companions": self.companions,
        }


class Loop:
    """Trains.

    Args:
        program: The user's functions.
        trainee: The model and what belongs to it.
        settings: How long, and where it is kept.
        crew: The ranks that train together.
        told: Listens to signals.
        step: The step to go on from.

    Attributes:
        step: Steps that are done.
        messages: What the morning should know.
    """

    def __init__(
        self, program: Program, trainee: Trainee, settings: LoopSettings, crew: Crew, told: StopRequests, *, step: int
    ) -> None:
        self.step = step
        self.messages: list[str] = []
        self._program = program
        self._trainee = trainee
        self._settings = settings
        self._crew = crew
        self._told = told
        self._seeds = StepSeeds(trainee.model, settings.seed)
        self._saved = time.monotonic()
        self._failed_saves = 0
        self._not_finite = 0
        self._unlogged: tuple[int, torch.Tensor, float, Mapping[str, int]] | None = None
        self._times_ms: list[float] = []

    @property
    def step_ms(self) -> float | None:
        """Median time of the steps of this process but its first few, in ms."""
        times = self._times_ms[5:]
        return statistics.median(times) if times else None

    def run(self, batches: Callable[[int], Any], *, to: int | None = None) -> str:
        """Takes steps until the last, or until it is told to stop; saves at the end.

        Args:
            batches: Opens the loader at a step.
            to: Stop after this step; the day's last by default.

        Returns:
            ``done``, the name of a signal, or ``window over``.

        Raises:
            MosaicError: The loss is no number, rows cannot be read, or checkpoints cannot be written.
        """
        last, ended = min(to or self._settings.num_steps, self._settings.num_steps), "done"
        if self.step < last:
            with batches(self.step) as loader:
                for batch in loader:
                    began = time.perf_counter()
                    loss = self._take_step(batch)
                    self.step += 1
                    self._log(loss, batch)
                    self._times_ms.append((time.perf_counter() - began) * 1e3)
                    ended = self._agree_to_stop()
                    if ended or self.step >= last:
                        break
        self._flush_log()
        self._save(is_last=True)
        return ended or "done"

    def _take_step(self, batch: Any) -> torch.Tensor:
        trainee, scaler = self._trainee, self._trainee.scaler
        total: Any = 0.0
        for number, (rows, weight) in enumerate(zip(batch.micro_batches, batch.weights, strict=True)):
            self._seeds.sow(self.step, number)
            with self._crew.adding(number):
                loss = self._program.loss(trainee.model, self._crew.moved(rows)) * weight
                (scaler.scale(loss) if scaler is not None else loss).backward()
            total = total + loss.detach()
        self._crew.finish_gradients()
        for optimizer in trainee.optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        for scheduler in trainee.schedulers:
            scheduler.step()
        for optimizer in trainee.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._program.update_companions is not None:
            with torch.no_grad():
                self._program.update_companions(trainee.model, trainee.companions)
        return total

    def _log(self, loss: torch.Tensor, batch: Any) -> None:
        """Keeps a step's figures until the next one is launched, so that reading its loss does not hold that up."""
        self._flush_log()
        self._unlogged = self.step, loss, time.time(), batch.rejects

    def _flush_log(self) -> None:
        if self._unlogged is None:
            return
        (step, loss, at, rejects), self._unlogged = self._unlogged, None
        value = float(loss)
        self._not_finite = 0 if math.isfinite(value) else self._not_finite + 1
        if self._not_finite >= MAX_STEPS_NOT_FINITE:
            raise MosaicError(
                f"the loss of step {step} and of the {self._not_finite - 1} before it is {value}; lower the learning "
                "rate, or look at the day's data"
            )
        if self._settings.metrics is None or step % self._settings.log_every:
            return
        row: dict[str, Any] = {"step": step, "loss": value, "at": round(at, 3)}
        if self._times_ms:
            row["ms"] = round(self._times_ms[-1], 3)
        if rejects:
            row["rejects"] = dict(rejects)
        try:
            append_line(self._settings.metrics, row)
        except OSError as error:
            self._remember(f"lines of {self._settings.metrics.name} are missing: {error.strerror or error}")

    def _agree_to_stop(self) -> str:
        """Returns why all ranks stop here, or nothing; saves if it is time to."""
        now, settings = time.monotonic(), self._settings
        over = settings.until is not None and now >= settings.until
        flags = self._crew.highest((bool(self._told.received), over, now - self._saved >= settings.save_s))
        if flags[0] or flags[1]:
            return (self._told.received or "told by another rank") if flags[0] else WINDOW_OVER
        if flags[2]:
            self._save(is_last=False)
        return ""

    def _save(self, *, is_last: bool) -> None:
        """Begins a checkpoint; the last one is waited for. One that finds the disk full is told and left out."""
        self._saved = time.monotonic()
        keeper, settings = self._trainee.keeper, self._settings
        try:
            keeper.save(
                settings.checkpoints, step=self.step, keep=settings.keep, extra=self._extra(), **self._trainee.belongings
            )
            if is_last:
                keeper.finish_saving()
        except MosaicError as error:
            self._failed_saves += 1
            self._remember(f"a checkpoint at step {self.step} could not be written: {error}")
            if self._failed_saves > 1:
                raise
            if self._crew.rank == 0:
                drop_old(settings.checkpoints, 1)
            if is_last:
                self._save(is_last=True)
        else:
            self._failed_saves = 0

    def _extra(self) -> dict[str, Any]:
        return {"messages": list(self.messages)}

    def _remember(self, message: str) -> None:
        if message not in self.messages:
            self.messages.append(message)
            _LOG.warning("%s", message)
