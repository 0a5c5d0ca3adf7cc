"""A day's training: data, model, plan, state of the last checkpoint, and the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mosaic
from mosaic.artifact import load, save
from mosaic.checkpoint.folder import check_room, checkpoints_in, damage_of
from mosaic.checkpoint.loading import Loaded
from mosaic.checkpoint.methods import KeepsCheckpoints, KeptModel
from mosaic.checkpoint.ranks import OneRank
from mosaic.checkpoint.saving import room_needed
from mosaic.checkpoint.weights import export
from mosaic.engine import Options
from mosaic.errors import InvalidCheckpointError, InvalidFileError, UnsupportedModelError
from mosaic.pipelining.plan import PipelinePlan
from mosaic.ranks.running.prepare import find_for_ranks
from mosaic.solver.runnable import DATA_PARALLEL
from mosaic.train import choice
from mosaic.train.budget import DaySettings
from mosaic.train.data.iterable import IterableLoader
from mosaic.train.data.loader import BatchCut, BatchLoader, MicroBatch, StepLoader
from mosaic.train.data.samples import RejectCount, Samples
from mosaic.train.data.seeds import seed_step
from mosaic.train.environment import environment_here
from mosaic.train.loop import Loop, TrainState
from mosaic.train.pipelined import PipelinedModel
from mosaic.train.program import Program
from mosaic.train.records import NEW_WEIGHTS, DayNotes, Environment, PlanKey, StoredPlan, Trained
from mosaic.train.signals import StopRequests
from mosaic.train.worker_group import WorkerGroup

_LOG = logging.getLogger(__name__)


class Day:
    """A day that is ready to train; every rank constructs its own. An iterable data set is opened by ``samples``."""

    def __init__(
        self,
        program: Program,
        samples: Samples | Callable[[], Iterable[Any]],
        settings: DaySettings,
        group: WorkerGroup,
    ) -> None:
        self._program = program
        self._samples = samples
        self._settings = settings
        self._group = group
        self.model = self._new_model()
        batches = [group.moved(part.data) for part in self._first_micro_batches()]
        self.plan, within_day = self._plan_of_day(batches)
        torch.set_num_threads(self.plan.threads)
        self.handle = self._placed(batches)
        self._state = self._train_state()
        self._differences = "; ".join(filter(None, (within_day, self._environment())))

    def train(self, stop: StopRequests, *, to: int | None = None) -> Trained:
        """Trains from the last checkpoint to the day's last step, to ``to``, or to a stop signal.

        Raises:
            MosaicError: The training failed, or its checkpoints cannot be read or written.
        """
        settings, group = self._settings, self._group
        step, notes, state = self._begin()
        loop = Loop(self._program, self._state, settings, group, stop, step=step, notes=notes)
        self.model.train()
        rejects = RejectCount(settings.max_unreadable)
        if group.rank == 0 or group.reads_all:  # a checkpoint adds the counts of all ranks
            rejects.resume(step * settings.budget.batch, notes.rejects)
        with self._loader(range(step, settings.num_steps), settings.budget.workers, rejects, state) as batches:
            ended = loop.run(batches, min(to or settings.num_steps, settings.num_steps))
        if self.plan.step_ms is None and loop.step_ms is not None and group.rank == 0:
            self.plan = replace(self.plan, step_ms=loop.step_ms)
            save(self.plan, settings.plan)
        return Trained(
            ended=ended,
            step=loop.step,
            num_steps=settings.num_steps,
            step_ms=loop.step_ms,
            digest=self.handle.digest(),
            notes=loop.notes,
        )

    def leave(self) -> None:
        """Restores the plain model on every rank; in a pipeline, the layers of the rank."""
        if isinstance(self.handle, mosaic.Handle | PipelinedModel):
            self.handle.remove()

    def export(self, path: Path, name: str | None) -> nn.Module | None:
        """Leaves, and writes the model, or the EMA model of a name, as one plain file.

        Returns:
            The written model; None if it is divided over ranks.
        """
        model = self.model if name is None else self._state.companions[name]
        if isinstance(self.handle, PipelinedModel):
            KeptModel(model, self._group.ranks).export(path)
            self.leave()
            return None
        self.leave()
        if self._group.rank == 0:
            export(model, path, OneRank())
        return model

    def try_step(self) -> float:
        """Takes one step for a check and discards it; returns its loss."""
        rejects = RejectCount(self._settings.max_unreadable)
        stop, notes = StopRequests(), DayNotes(loaded="", rejects={})
        loop = Loop(self._program, self._state, self._settings, self._group, stop, step=0, notes=notes)
        self.model.train()
        with self._loader(range(1), 0, rejects) as batches:
            return self._group.mean_loss(loop.take_step(next(batches)))

    def check_for_ranks(self) -> None:
        """Raises UnsupportedModelError if several ranks could not train the plain model that ``leave`` restores."""
        batch, model = self._group.moved(self._first_micro_batches()[0].data), self.model
        try:
            find_for_ranks(model, lambda: self._program.loss(model, batch), None, self._settings.budget.exclude)
        except UnsupportedModelError as error:
            raise _for_recipe(error) from error

    @property
    def checkpoint_bytes(self) -> int:
        state = self._state
        return room_needed(self.model, state.optimizers, state.companions)

    # Data.

    def _new_model(self) -> nn.Module:
        seed_step(self._settings.budget.seed, 0, 0)
        return self._program.make_model().to(self._group.device)

    def _first_micro_batches(self) -> tuple[MicroBatch, ...]:
        with self._loader(range(1), 0, RejectCount(1.0)) as batches:
            return next(batches).micro_batches

    @property
    def _cut(self) -> BatchCut:
        budget, group = self._settings.budget, self._group
        return BatchCut(
            batch=budget.batch,
            num_ranks=1 if group.reads_all else group.size,
            rank=0 if group.reads_all else group.rank,
            micro_batches=budget.micro_batches,
        )

    def _loader(self, steps: range, workers: int, rejects: RejectCount, state: Any = None) -> StepLoader:
        if not isinstance(self._samples, Samples):
            return IterableLoader(
                self._samples(),
                self._cut,
                steps,
                seed=self._settings.budget.seed,
                state=state,
                exact=self._settings.exact_data,
                collate=self._program.collate,
            )
        return BatchLoader(
            self._samples,
            self._cut,
            steps,
            workers=workers,
            collate=self._program.collate,
            pin=self._group.device.type == "cuda",
            rejects=rejects,
        )

    # The plan.

    def _plan_of_day(self, batches: list[Any]) -> tuple[StoredPlan, str]:
        """Returns the plan of the day, and the reason that it changed within the day; empty if it did not."""
        settings, group = self._settings, self._group
        key = choice.key_of(self.model, batches[0], group.device, group.size, settings.modalities, settings.budget)
        current = _read(settings.plan)
        within_day = key.differences(current.key) if current is not None else ""
        if current is not None and not within_day:
            return current, ""
        before = _read(settings.plan_before) if current is None else None
        why = within_day or choice.reason_to_plan(key, before, settings.drift)
        plan = replace(before, why="") if before is not None and not why else self._chosen(key, batches, why)
        if group.rank == 0 and (group.size == 1 or settings.budget.pipeline or plan.plan is not None):
            save(plan, settings.plan)  # several ranks choose a new plan in _placed
        return plan, within_day and f"{within_day}, so it was planned anew"

    def _chosen(self, key: PlanKey, batches: list[Any], why: str) -> StoredPlan:
        settings, group = self._settings, self._group
        if settings.budget.pipeline:
            pipelined = self._pipelined(batches, None)
            pipelined.remove()
            self.model = self._new_model()  # the trial may have changed it
            return replace(choice.stored(key, why, pipelined.describe()), pipeline=pipelined.way)
        if not settings.budget.colocate and group.size == 1:
            return choice.stored(key, why, "the recipe asks for the plain loop")
        if group.size > 1:
            return choice.stored(key, why, "")
        model = self._new_model()
        plan, profile = choice.choose_by_trial(model, batches[0], self._program.loss, key, why, settings.budget.exclude)
        if profile is not None:
            save(profile, settings.profile)
        return plan

    def _pipelined(self, batches: list[Any], way: PipelinePlan | None) -> PipelinedModel:
        self.model.train()
        return PipelinedModel(
            self.model, self._program.loss, batches, way=way, memory_bytes=self._settings.budget.memory_bytes
        )

    def _placed(self, batches: list[Any]) -> KeepsCheckpoints:
        """Places the model by the plan; several ranks choose a new plan here, before the first step."""
        group, plan, batch = self._group, self.plan, batches[0]
        if plan.pipeline is not None:
            return self._pipelined(batches, plan.pipeline)

        def sample() -> Any:
            return self._program.loss(self.model, batch)

        if plan.plan is None and group.size == 1:
            return KeptModel(self.model, group.ranks)
        options = Options(trial=None) if plan.plan is not None else Options()
        if plan.plan is None and not self._settings.budget.colocate:
            options = Options(method=DATA_PARALLEL)
        try:
            handle = mosaic.colocate(
                self.model, sample, plan=plan.plan, exclude=self._settings.budget.exclude, options=options
            )
        except UnsupportedModelError as error:
            raise _for_recipe(error) from error
        if plan.plan is None:
            self.plan = choice.stored(plan.key, plan.why, handle.describe(), handle)
            if group.rank == 0:
                save(self.plan, self._settings.plan)
        return handle

    # State.

    def _train_state(self) -> TrainState:
        program, model = self._program, self.model
        optimizers, schedulers = program.optimizers(model, self._settings.num_steps)
        return TrainState(
            model=model,
            keeper=self.handle,
            optimizers=optimizers,
            schedulers=schedulers,
            scaler=program.make_scaler() if program.make_scaler is not None else None,
            companions=dict(program.make_companions(model)) if program.make_companions is not None else {},
        )

    def _environment(self) -> str:
        """Describes changes of the environment since the day began; empty for none."""
        settings, group = self._settings, self._group
        here = environment_here(group.device, num_ranks=group.size, program=settings.program)
        if not settings.environment.is_file():
            if group.rank == 0:
                save(here, settings.environment)
            return ""
        before = load(Environment, settings.environment)
        return "; ".join(here.differences(before))

    def _begin(self) -> tuple[int, DayNotes, Any]:
        """Loads the day's last checkpoint, or starts from the champion; returns step, notes and the data's state."""
        settings, keeper = self._settings, self.handle
        checkpoint = self._load()
        if checkpoint is not None:
            notes = DayNotes(**checkpoint.extra["notes"])
            if self._differences and notes.differs_from_step is None:
                notes = replace(notes, differs_from_step=checkpoint.step, differs_because=self._differences)
            states = checkpoint.extra["data"]
            return checkpoint.step, notes, states[self._group.rank] if self._group.rank < len(states) else None
        notes = DayNotes(loaded=self._start(), rejects={})
        if self._group.rank == 0:
            count = settings.budget.keep + 2
            model_bytes = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
            check_room(
                settings.checkpoints,
                checkpoint_bytes=self.checkpoint_bytes,
                count=count,
                more_bytes=2 * model_bytes,
            )
        extra = {"notes": asdict(notes), "data": [None] * self._group.size}
        keeper.save(settings.checkpoints, step=0, extra=extra, **self._state.checkpointed)
        return 0, notes, None

    def _load(self) -> Loaded | None:
        """Loads the newest intact checkpoint; without one the day starts again, with the same bits."""
        folder = self._settings.checkpoints
        try:
            return self.handle.load(folder, fall_back=True, missing_ok=True, **self._state.checkpointed)
        except InvalidCheckpointError:
            if not all(damage_of(checkpoint.path) for checkpoint in checkpoints_in(folder)):
                raise
            _LOG.warning("all checkpoints in %s are damaged; the day starts again", folder)
            return None

    def _start(self) -> str:
        """Loads the champion's weights and, if present, its optimizers' moments; describes the result."""
        settings, state = self._settings, self._state
        if settings.weights is None:
            return NEW_WEIGHTS
        if settings.start is not None and checkpoints_in(settings.start):
            try:  # no fall_back: an earlier checkpoint is not the champion
                loaded = self.handle.load(
                    settings.start,
                    optimizer=state.optimizers,
                    companions=state.companions,
                    partial=True,
                    new_run=True,
                )
            except InvalidCheckpointError as error:
                _LOG.warning("%s; the day begins from the champion's weights, without its optimizers' state", error)
            else:
                assert loaded is not None
                return _description(
                    "weights and the optimizers' state of the champion", loaded.new, loaded.gone, loaded.changed
                )
        overlap = self.handle.load_weights(settings.weights, partial=True)
        for companion in state.companions.values():
            companion.load_state_dict(self.model.state_dict(), strict=False)
        return _description("weights of the champion", overlap.new, overlap.gone, overlap.changed)


def device_of(name: str, rank: int) -> torch.device:
    """Returns the device of a rank: ``cpu``, ``cuda``, or ``auto`` for a GPU if present."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def end_ranks() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _read(path: Path | None) -> StoredPlan | None:
    if path is None or not path.is_file():
        return None
    try:
        return load(StoredPlan, path)
    except InvalidFileError as error:
        _LOG.warning("%s; the day is planned again", error)
        return None


def _for_recipe(error: UnsupportedModelError) -> UnsupportedModelError:
    return UnsupportedModelError(f"{error}; in [budget] that is exclude; or set ranks = 1")


def _description(source: str, new: Iterable[str], gone: Iterable[str], changed: Iterable[str]) -> str:
    parts = [
        f"{label}: {', '.join(names)}" for label, names in (("new", new), ("gone", gone), ("changed", changed)) if names
    ]
    return "; ".join((source, *parts))
