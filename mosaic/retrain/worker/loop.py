"""The loop of a day, which survives a kill at any instant and resumes with equal bits; and its worker group.

A step is a function of the state before it, of its positions in the stream, and of (seed, step, micro-batch): every
random number is seeded by these. A checkpoint therefore holds the model, the optimizers, and one step number.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.artifact import append_line
from mosaic.checkpoint.checkpointer import Checkpointer, gather_objects
from mosaic.engine import Handle
from mosaic.errors import MosaicError, NoRoomError
from mosaic.find.random_numbers import Generator
from mosaic.ranks.world.world import init_process_group
from mosaic.retrain.records import WINDOW_OVER, DayNotes
from mosaic.retrain.worker.loader import BatchLoader, StepBatch
from mosaic.retrain.worker.positions import generators_of, seed_step
from mosaic.retrain.worker.work import Work
from mosaic.retrain.workers import StopRequests

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
MAX_TRIES = 3
"""Most attempts of a step whose modules are called in a new way."""
MAX_STEPS_NOT_FINITE = 20
"""Consecutive steps with an infinite or NaN loss after which a day fails; a scaler skips a few."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A rank's part of a step's loss; the copy to the host overlaps the launch of the next step."""

    part: torch.Tensor
    """On the host."""
    arrived: torch.cuda.Event | None
    """End of the copy; None if it is done."""


class WorkerGroup:
    """One process that trains alone, or one rank of several, by torchrun's variables."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._group: Any = None

    def leave(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    def moved(self, batch: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)

    def bring(self, losses: list[torch.Tensor]) -> StepLoss:
        """Starts to copy this rank's part of a step's loss to the host; does not wait."""
        part = (torch.stack([loss.double() for loss in losses]).sum() / self.size).to("cpu", non_blocking=True)
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return StepLoss(part, arrived)

    def agree(self, flags: tuple[bool, ...], loss: StepLoss | None) -> tuple[tuple[bool, ...], float | None]:
        """Returns each flag that any rank has set, and the mean loss of a step over all ranks."""
        local = torch.tensor([*flags, 0.0], dtype=torch.float64)
        if loss is not None:
            if loss.arrived is not None:
                loss.arrived.synchronize()
            local[-1] = loss.part
        if self.size > 1:
            dist.all_reduce(local, group=self._cpu_group())
        return tuple(value > 0 for value in local[:-1].tolist()), None if loss is None else float(local[-1])

    def mean_loss(self, loss: StepLoss) -> float:
        mean = self.agree((), loss)[1]
        assert mean is not None
        return mean

    def gather(self, value: _T) -> list[_T]:
        return gather_objects(self._cpu_group() if self.size > 1 else None, value)

    def _cpu_group(self) -> Any:
        """A group on CPUs for a few numbers."""
        if self._group is None:
            if not dist.is_initialized():
                init_process_group(self.device)
            self._group = dist.new_group(backend="gloo")
        return self._group


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The train state: a model with its optimizers, schedulers, scaler and EMA models."""

    model: nn.Module
    keeper: Checkpointer
    """The model's handle."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    """A GradScaler, or None."""
    companions: Mapping[str, nn.Module]

    @property
    def checkpointed(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "scaler": self.scaler,
            "companions": self.companions,
        }


@dataclass(slots=True, kw_only=True)
class Loop:
    """The training loop, from a step and the notes of its checkpoint."""

    work: Work
    state: TrainState
    group: WorkerGroup
    stop: StopRequests
    until: float | None
    """Deadline on the clock of ``time.monotonic()``; None for none."""
    step: int
    notes: DayNotes
    _saved: float = field(init=False, default_factory=time.monotonic)
    _failed_saves: int = field(init=False, default=0)
    _not_finite: int = field(init=False, default=0)
    _unlogged: deque[tuple[dict[str, Any], StepLoss]] = field(init=False, default_factory=deque)
    """Rows of finished steps that lack their loss, and are not in the log yet."""
    _generators: tuple[Generator, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._generators = generators_of(self.state.model)

    def run(self, batches: BatchLoader, last: int) -> str:
        """Takes steps up to ``last``, or until a stop signal; then saves.

        Returns ``done``, the name of a signal, or ``window over``.
        """
        ended = ""
        while self.step < last and not (ended := self._agree_to_stop(batches)):
            began = time.perf_counter()
            try:
                batch = next(batches)
            except MosaicError:
                if not self.stop.received:  # the stop signal may have ended the loader's workers
                    raise
                continue
            loss = self.take_step(batch)
            self.step += 1
            ms = (time.perf_counter() - began) * 1e3
            row: dict[str, Any] = {"step": self.step, "loss": None, "at": round(time.time(), 3), "ms": round(ms, 3)}
            if batch.rejects:
                row["rejects"] = list(map(str, batch.rejects))
            self._unlogged.append((row, loss))
        self._save(batches, is_last=True)
        return ended or "done"

    def take_step(self, batch: StepBatch) -> StepLoss:
        """Takes one optimizer step; returns this rank's part of its loss, perhaps still on the device."""
        state, scaler = self.state, self.state.scaler
        losses = self._gradients(batch)
        for optimizer in state.optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        for scheduler in state.schedulers:
            scheduler.step()
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        if self.work.program.update_companions is not None:
            with torch.no_grad():
                self.work.program.update_companions(state.model, state.companions)
        return self.group.bring(losses)

    def _gradients(self, batch: StepBatch) -> list[torch.Tensor]:
        """Runs forward and backward; returns the losses.

        A module's first call of a kind runs on other threads than later calls. A resumed process makes them in other
        steps than a process that was never killed. Steps with first calls therefore run again.
        """
        model, keeper = self.state.model, self.state.keeper
        if isinstance(keeper, Handle) and self.group.device.type == "cpu":
            for _ in range(MAX_TRIES):
                num_learned = keeper.num_learned
                buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
                losses = self._try_gradients(batch)
                if not any(self.group.agree((keeper.num_learned > num_learned,), None)[0]):
                    return losses
                model.zero_grad()
                with torch.no_grad():
                    for name, buffer in model.named_buffers():
                        if name in buffers:
                            buffer.copy_(buffers[name])
        return self._try_gradients(batch)  # not colocated, or new calls each time

    def _try_gradients(self, batch: StepBatch) -> list[torch.Tensor]:
        state, scaler, group = self.state, self.state.scaler, self.group
        losses = []
        for part in batch.micro_batches:
            seed_step(self.work.budget.seed, self.step, part.index, self._generators)
            # Ranks average their gradients; times their number, parts add up to the mean over the global batch.
            loss = self.work.program.loss(state.model, group.moved(part.data)) * (part.weight * group.size)
            (scaler.scale(loss) if scaler is not None else loss).backward()
            losses.append(loss.detach())
        return losses

    def _agree_to_stop(self, batches: BatchLoader) -> str:
        """Returns the reason that all ranks stop, or an empty text; saves when a checkpoint is due."""
        now = time.monotonic()
        over = self.until is not None and now >= self.until
        flags = bool(self.stop.received), over, now - self._saved >= self.work.budget.save
        # the loss of the step before the last: the GPU has work while it is read
        row, before = self._unlogged.popleft() if len(self._unlogged) > 1 else ({}, None)
        (stop, over, due), loss = self.group.agree(flags, before)
        if loss is not None:
            self._write(row, loss)
        if stop:
            return self.stop.received or "stopped by another rank"
        if over:
            return WINDOW_OVER
        if due:
            self._save(batches, is_last=False)
        return ""

    def _write(self, row: dict[str, Any], value: float) -> None:
        self._not_finite = 0 if math.isfinite(value) else self._not_finite + 1
        if self._not_finite >= MAX_STEPS_NOT_FINITE:
            raise MosaicError(
                f"the loss of step {row['step']} and of the {self._not_finite - 1} before it is {value}; lower the "
                "learning rate, or look at the day's data"
            )
        if self.group.rank > 0:
            return
        try:
            append_line(self.work.day.metrics, {**row, "loss": value})
        except OSError as error:
            self._remember(f"lines of {self.work.day.metrics.name} are missing: {error.strerror or error}")

    def _save(self, batches: BatchLoader, *, is_last: bool) -> None:
        """Begins a checkpoint; waits for the last one.

        Two saves in a row on a full disk are an error.
        """
        keeper, folder, keep = self.state.keeper, self.work.day.checkpoints, self.work.budget.keep
        for row, loss in self._unlogged:  # a run that resumes here does not repeat them
            self._write(row, self.group.mean_loss(loss))
        self._unlogged.clear()
        if self._not_finite and not is_last:  # the last checkpoint is from before the loss was NaN
            return
        self._saved = time.monotonic()
        total: dict[str, dict[str, int]] = {}
        for counts in self.group.gather(batches.rejects.by_source):
            for source, reasons in counts.items():
                sums = total.setdefault(source, {})
                sums |= {reason: sums.get(reason, 0) + count for reason, count in reasons.items()}
        self.notes = replace(self.notes, rejects=total)
        try:
            keeper.save(
                folder, step=self.step, keep=keep, extra={"notes": asdict(self.notes)}, **self.state.checkpointed
            )
            if is_last:
                keeper.finish_saving()
            self._failed_saves = 0
        except NoRoomError as error:
            self._failed_saves += 1
            self._remember(f"the disk was full when a checkpoint was written at or before step {self.step}")
            if self._failed_saves > 1:
                raise
            _LOG.warning("%s", error)
            if is_last:
                self._save(batches, is_last=True)

    def _remember(self, message: str) -> None:
        if message not in self.notes.messages:
            self.notes = replace(self.notes, messages=(*self.notes.messages, message))
            _LOG.warning("%s", message)
