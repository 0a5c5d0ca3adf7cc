"""The loop of a day: it can be killed at any instant, and goes on with the same bits.

A step is a function of the state before it, of its positions in the stream, and of (seed, step, micro-batch): every
random number is drawn under these. So the state that is kept is the model's, the optimizers', and one step number.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mosaic.checkpoint.methods import KeepsCheckpoints
from mosaic.engine import Handle
from mosaic.errors import MosaicError, NoRoomError
from mosaic.lines import append_line
from mosaic.train.crew import Crew, StepLoss
from mosaic.train.data.loader import StepBatch, StepLoader
from mosaic.train.data.samples import Reject
from mosaic.train.data.seeds import generators_of, seed_step
from mosaic.train.pipelined import PipelinedModel
from mosaic.train.program import Program
from mosaic.train.records import WINDOW_OVER, DayNotes
from mosaic.train.signals import StopRequests

_LOG = logging.getLogger(__name__)
FIRST_STEPS = 5
"""Steps of a process that are slower than the others, and do not count for its median."""
MAX_TRIES = 3
"""How often a step is made anew whose modules were called in a new way."""
MAX_STEPS_NOT_FINITE = 20
"""Steps in a row whose loss is infinite or no number, after which a day fails; a scaler skips a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What a loop is told."""

    seed: int
    """Of everything that is drawn."""
    save_s: float
    """Seconds between checkpoints."""
    keep: int
    """Checkpoints that stay."""
    clip_norm: float | None = None
    """Norm that gradients are scaled down to; None for no limit."""
    until: float | None
    """When the training has to end, as ``time.monotonic()`` counts; None for never."""
    checkpoints: Path
    """The day's checkpoints."""
    metrics: Path | None
    """``metrics.jsonl``; None on all ranks but the first."""


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


@dataclass(frozen=True, slots=True)
class _Unlogged:
    """A step that is done, but not in the log."""

    step: int
    loss: StepLoss
    at: float
    ms: float
    rejects: tuple[Reject, ...]


class Loop:
    """Trains.

    Args:
        program: The user's functions.
        trainee: The model and what belongs to it.
        settings: How long, and where it is kept.
        crew: The ranks that train together.
        told: Listens to signals.
        step: The step to go on from.
        notes: What the checkpoint said.

    Attributes:
        step: Steps that are done.
        notes: What the next checkpoint says.
    """

    def __init__(
        self,
        program: Program,
        trainee: Trainee,
        settings: LoopSettings,
        crew: Crew,
        told: StopRequests,
        *,
        step: int,
        notes: DayNotes,
    ) -> None:
        self.step = step
        self.notes = notes
        self._program = program
        self._trainee = trainee
        self._settings = settings
        self._crew = crew
        self._told = told
        self._generators = generators_of(trainee.model)
        self._saved = time.monotonic()
        self._failed_saves = 0
        self._not_finite = 0
        self._unlogged: deque[_Unlogged] = deque()
        self._times_ms: list[float] = []
        self._batches: StepLoader | None = None

    @property
    def step_ms(self) -> float | None:
        """Median time of the steps of this process but its first few, in ms."""
        times = self._times_ms[FIRST_STEPS:]
        return statistics.median(times) if times else None

    def run(self, batches: StepLoader, last: int) -> str:
        """Takes steps up to ``last``, or until it is told to stop; then saves.

        Returns:
            ``done``, the name of a signal, or ``window over``.

        Raises:
            MosaicError: The loss is no number, rows cannot be read, or checkpoints cannot be written.
        """
        ended, self._batches = "", batches
        while self.step < last and not (ended := self._agree_to_stop()):
            began = time.perf_counter()
            try:
                batch = next(batches)
            except MosaicError:
                if not self._told.received:  # whoever told us to stop may have ended the loader's workers
                    raise
                continue
            loss = self.take_step(batch)
            self.step += 1
            self._times_ms.append((time.perf_counter() - began) * 1e3)
            self._unlogged.append(_Unlogged(self.step, loss, time.time(), self._times_ms[-1], batch.rejects))
        self.save(is_last=True)
        return ended or "done"

    def take_step(self, batch: StepBatch) -> StepLoss:
        """Takes one optimizer step; returns this rank's part of its loss, which need not have arrived."""
        trainee, scaler, crew = self._trainee, self._trainee.scaler, self._crew
        losses = self._gradients(batch)
        crew.finish()
        self._clip()
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
            optimizer.zero_grad()
        if self._program.update_companions is not None:
            with torch.no_grad():
                self._program.update_companions(trainee.model, trainee.companions)
        return crew.bring(losses)

    def _gradients(self, batch: StepBatch) -> list[torch.Tensor]:
        """Goes forward and backward; returns the losses.

        A module's first call of a kind is made on other threads than all others, and a process that goes on from a
        checkpoint makes first calls in other steps than one that was never killed: so none of them counts.
        """
        model, keeper = self._trainee.model, self._trainee.keeper
        if isinstance(keeper, Handle) and self._crew.device.type == "cpu":
            for _ in range(MAX_TRIES):
                known, buffers = keeper.num_learned, {name: buffer.clone() for name, buffer in model.named_buffers()}
                losses = self._try_gradients(batch)
                if not any(self._crew.any_of(keeper.num_learned > known)):
                    return losses
                model.zero_grad()
                with torch.no_grad():
                    for name, buffer in model.named_buffers():
                        if name in buffers:
                            buffer.copy_(buffers[name])
        return self._try_gradients(batch)  # of a model that is not colocated, or whose calls are never alike

    def _try_gradients(self, batch: StepBatch) -> list[torch.Tensor]:
        trainee, scaler, crew = self._trainee, self._trainee.scaler, self._crew
        if isinstance(trainee.keeper, PipelinedModel):
            seed_step(self._settings.seed, self.step, 0)
            return trainee.keeper.add_gradients([crew.moved(part.data) for part in batch.micro_batches], scaler)
        losses = []
        for part in batch.micro_batches:
            seed_step(self._settings.seed, self.step, part.index, self._generators)
            with crew.micro_batch(part.index):
                loss = self._program.loss(trainee.model, crew.moved(part.data)) * (part.weight * crew.scale)
                (scaler.scale(loss) if scaler is not None else loss).backward()
            losses.append(loss.detach())
        return losses

    def _clip(self) -> None:
        if self._settings.clip_norm is None:
            return
        trainee = self._trainee
        if trainee.scaler is not None:
            for optimizer in trainee.optimizers:
                trainee.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trainee.model.parameters(), self._settings.clip_norm)

    def _flush_log(self) -> None:
        """Writes the figures of all steps that are done; a run that goes on from here makes none of them again."""
        for unlogged in self._unlogged:
            self._write(unlogged, self._crew.mean_loss(unlogged.loss))
        self._unlogged.clear()

    def _write(self, done: _Unlogged, value: float) -> None:
        step, rejects = done.step, done.rejects
        self._not_finite = 0 if math.isfinite(value) else self._not_finite + 1
        if self._not_finite >= MAX_STEPS_NOT_FINITE:
            raise MosaicError(
                f"the loss of step {step} and of the {self._not_finite - 1} before it is {value}; lower the learning "
                "rate, or look at the day's data"
            )
        if self._settings.metrics is None:
            return
        row: dict[str, Any] = {"step": step, "loss": value, "at": round(done.at, 3), "ms": round(done.ms, 3)}
        if rejects:
            row["rejects"] = [f"{each.source} row {each.row}: {each.reason}: {each.detail}" for each in rejects]
        try:
            append_line(self._settings.metrics, row)
        except OSError as error:
            self._remember(f"lines of {self._settings.metrics.name} are missing: {error.strerror or error}")

    def _agree_to_stop(self) -> str:
        """Returns why all ranks stop here, or nothing; saves if it is time to."""
        now, settings = time.monotonic(), self._settings
        over = settings.until is not None and now >= settings.until
        flags = bool(self._told.received), over, now - self._saved >= settings.save_s
        # the loss of the step before the last, whose own may be on its way: so a GPU has work while it is read
        before = self._unlogged.popleft() if len(self._unlogged) > 1 else None
        (told, over, due), loss = self._crew.agree(flags, before.loss if before else None)
        if before is not None and loss is not None:
            self._write(before, loss)
        if told:
            return self._told.received or "told by another rank"
        if over:
            return WINDOW_OVER
        if due:
            self.save(is_last=False)
        return ""

    def save(self, *, is_last: bool) -> None:
        """Begins a checkpoint; the last one is waited for.

        Where the disk is full, old checkpoints are dropped and the loop goes on; twice in a row is an error.
        """
        keeper, settings = self._trainee.keeper, self._settings
        self._flush_log()
        self._saved = time.monotonic()
        try:
            keeper.save(
                settings.checkpoints,
                step=self.step,
                keep=settings.keep,
                extra=self._extra(),
                **self._trainee.belongings,
            )
            if is_last:
                keeper.finish_saving()
        except NoRoomError as error:
            self._failed_saves += 1
            self._remember(f"the disk was full when a checkpoint was written at or before step {self.step}")
            if self._failed_saves > 1:
                raise
            _LOG.warning("%s", error)
            keeper.make_room(settings.checkpoints)
            if is_last:
                self.save(is_last=True)
        else:
            self._failed_saves = 0

    def _extra(self) -> dict[str, Any]:
        """Returns what is kept beside tensors: of all ranks the rows that could not be read, and where the data is."""
        batches = self._batches
        mine = (batches.rejects.by_source, batches.state_dict()) if batches is not None else ({}, None)
        told = self._crew.gather(mine)
        total: dict[str, Counter[str]] = {}
        for counts, _ in told[:1] if self._crew.reads_all else told:
            for source, reasons in counts.items():
                total.setdefault(source, Counter()).update(reasons)
        self.notes = replace(self.notes, rejects={source: dict(reasons) for source, reasons in total.items()})
        return {"notes": asdict(self.notes), "data": [state for _, state in told]}

    def _remember(self, message: str) -> None:
        if message not in self.notes.messages:
            self.notes = replace(self.notes, messages=(*self.notes.messages, message))
            _LOG.warning("%s", message)
