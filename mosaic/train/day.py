"""A day's training put together: data, model, plan, state of the last checkpoint, and then the loop."""

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
from mosaic.checkpoint.folder import checkpoints_in, damage_of
from mosaic.checkpoint.loading import Loaded
from mosaic.checkpoint.methods import KeepsCheckpoints, KeptModel
from mosaic.checkpoint.plain_weights import export
from mosaic.checkpoint.ranks import OneRank
from mosaic.checkpoint.room import check_room, room_needed
from mosaic.engine import Options
from mosaic.errors import InvalidCheckpointError, InvalidFileError, UnsupportedModelError
from mosaic.pipelining.kept_way import KeptWay
from mosaic.ranks.running.prepare import find_for_ranks
from mosaic.solver.runnable import DATA_PARALLEL
from mosaic.train import choice
from mosaic.train.crew import Crew
from mosaic.train.data.iterable import IterableLoader
from mosaic.train.data.loader import BatchCut, BatchLoader, MicroBatch, StepLoader
from mosaic.train.data.samples import RejectCount, Samples
from mosaic.train.data.seeds import seed_step
from mosaic.train.day_settings import DaySettings
from mosaic.train.environment import environment_here
from mosaic.train.loop import Loop, Trainee
from mosaic.train.pipelined import PipelinedModel
from mosaic.train.program import Program
from mosaic.train.records import NEW_WEIGHTS, DayNotes, Environment, PlanKey, StoredPlan, Trained
from mosaic.train.signals import StopRequests

_LOG = logging.getLogger(__name__)


class Day:
    """A day that is ready to train; every rank makes its own.

    Args:
        program: The user's functions.
        samples: The day's data; of a data set that can only be gone through, a function that opens it.
        settings: All else.
        crew: The ranks.

    Raises:
        MosaicError: Data, plan or checkpoints are not as they have to be; says what.
    """

    def __init__(
        self, program: Program, samples: Samples | Callable[[], Iterable[Any]], settings: DaySettings, crew: Crew
    ) -> None:
        self._program = program
        self._samples = samples
        self._settings = settings
        self._crew = crew
        self.model = self._new_model()
        batches = [crew.moved(part.data) for part in self._first_micro_batches()]
        self.plan, within_day = self._plan_of_day(batches)
        torch.set_num_threads(self.plan.threads)
        self.handle = self._placed(batches)
        crew.begin(self.model, self._cut)
        self._trainee = self._made()
        self.handle.prepare_saving(optimizer=self._trainee.optimizers, companions=self._trainee.companions)
        self._differences = "; ".join(filter(None, (within_day, self._environment())))

    def train(self, told: StopRequests, *, to: int | None = None) -> Trained:
        """Trains from where the day stands to its last step, or to ``to``, unless it is told to stop.

        Raises:
            MosaicError: The training failed, or its checkpoints cannot be read or written; says what.
        """
        settings, crew = self._settings, self._crew
        step, notes, state = self._begin()
        loop = Loop(self._program, self._trainee, settings.loop, crew, told, step=step, notes=notes)
        self.model.train()
        rejects = RejectCount(settings.max_unreadable)
        if crew.rank == 0 or crew.reads_all:  # the counts of all ranks are added when they are kept
            rejects.load_state_dict({"samples": step * settings.batch, "rejects": notes.rejects})
        with self._loader(range(step, settings.num_steps), settings.workers, rejects, state) as batches:
            ended = loop.run(batches, min(to or settings.num_steps, settings.num_steps))
        if self.plan.step_ms is None and loop.step_ms is not None and crew.rank == 0:
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
        """Gives the plain model back: whole, on every rank; of a pipeline, what the rank has of it."""
        if isinstance(self.handle, mosaic.Handle | PipelinedModel):
            self.handle.remove()

    def export(self, path: Path, name: str | None) -> nn.Module | None:
        """Leaves, and writes the model as one plain file, or what is kept beside it under a name.

        Returns:
            What was written; None where it is divided over ranks.
        """
        model = self.model if name is None else self._trainee.companions[name]
        if isinstance(self.handle, PipelinedModel):
            KeptModel(model, self._crew.ranks).export(path)
            self.leave()
            return None
        self.leave()
        if self._crew.rank == 0:
            export(model, path, OneRank())
        return model

    def try_step(self) -> float:
        """Takes one step that nobody keeps, for a check; returns its loss."""
        rejects = RejectCount(self._settings.max_unreadable)
        told, notes = StopRequests(), DayNotes(loaded="", rejects={})
        loop = Loop(self._program, self._trainee, self._settings.loop, self._crew, told, step=0, notes=notes)
        self.model.train()
        with self._loader(range(1), 0, rejects) as batches:
            return self._crew.mean_loss(loop.take_step(next(batches)))

    def check_for_ranks(self) -> None:
        """Raises UnsupportedModelError if several ranks could not train the plain model, as ``leave`` gave it back."""
        batch, model = self._crew.moved(self._first_micro_batches()[0].data), self.model
        try:
            find_for_ranks(model, lambda: self._program.loss(model, batch), None, self._settings.exclude)
        except UnsupportedModelError as error:
            raise _for_recipe(error) from error

    @property
    def checkpoint_bytes(self) -> int:
        """Room that a checkpoint takes."""
        trainee = self._trainee
        return room_needed(self.model, trainee.optimizers, trainee.companions)

    # Data.

    def _new_model(self) -> nn.Module:
        seed_step(self._settings.loop.seed, 0, 0)
        return self._program.make_model().to(self._crew.device)

    def _first_micro_batches(self) -> tuple[MicroBatch, ...]:
        with self._loader(range(1), 0, RejectCount(1.0)) as batches:
            return next(batches).micro_batches

    @property
    def _cut(self) -> BatchCut:
        settings, crew = self._settings, self._crew
        return BatchCut(
            batch=settings.batch,
            num_ranks=1 if crew.reads_all else crew.size,
            rank=0 if crew.reads_all else crew.rank,
            micro_batches=settings.micro_batches,
            exact=settings.exact,
        )

    def _loader(self, steps: range, workers: int, rejects: RejectCount, state: Any = None) -> StepLoader:
        if not isinstance(self._samples, Samples):
            return IterableLoader(
                self._samples(),
                self._cut,
                steps,
                seed=self._settings.loop.seed,
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
            pin=self._crew.device.type == "cuda",
            rejects=rejects,
        )

    # The plan.

    def _plan_of_day(self, batches: list[Any]) -> tuple[StoredPlan, str]:
        """Returns the plan that the day runs, and why it is another one than the day began with; empty if it is not."""
        settings, crew = self._settings, self._crew
        key = choice.key_of(
            self.model,
            batches[0],
            crew.device,
            1 if settings.exact else crew.size,
            settings.modalities,
            colocate=settings.colocate,
            pipeline=settings.pipeline.said if settings.pipeline is not None else "",
        )
        there = _read(settings.plan)
        within_day = key.differences(there.key) if there is not None else ""
        if there is not None and not within_day:
            return there, ""
        before = _read(settings.plan_before) if there is None else None
        why = within_day or choice.reason_to_plan(key, before, settings.drift)
        chosen = replace(before, why="") if before is not None and not why else self._chosen(key, batches, why)
        if crew.rank == 0 and (crew.size == 1 or settings.exact or settings.pipeline is not None):
            save(chosen, settings.plan)
        return chosen, within_day and f"{within_day}, so it was planned anew"

    def _chosen(self, key: PlanKey, batches: list[Any], why: str) -> StoredPlan:
        settings, crew = self._settings, self._crew
        if settings.pipeline is not None:
            tried = self._pipelined(batches, None)
            tried.remove()
            self.model = self._new_model()  # whatever the trial left in it
            return choice.stored_of_pipeline(tried, key, why)
        if settings.exact:
            return choice.plain(key, why, "every rank has the whole model, so that their number changes no bit")
        if not settings.colocate and crew.size == 1:
            return choice.plain(key, why, "the recipe asks for the plain loop")
        if crew.size > 1:
            return choice.plain(key, why, "")  # colocate() tries plans by itself; see _placed
        model = self._new_model()
        chosen, profile = choice.choose_by_trial(model, batches[0], self._program.loss, key, why, settings.exclude)
        if profile is not None:
            save(profile, settings.profile)
        return chosen

    def _pipelined(self, batches: list[Any], way: KeptWay | None) -> PipelinedModel:
        assert self._settings.pipeline is not None
        limit = self._settings.pipeline.memory_bytes
        self.model.train()
        return PipelinedModel(self.model, self._program.loss, batches, way=way, memory_bytes=limit)

    def _placed(self, batches: list[Any]) -> KeepsCheckpoints:
        """Lets the plan run the model; on several ranks a new one is chosen here, before the first step."""
        crew, plan, batch = self._crew, self.plan, batches[0]
        if plan.pipeline is not None:
            return self._pipelined(batches, plan.pipeline)

        def sample() -> Any:
            return self._program.loss(self.model, batch)

        if self._settings.exact or (plan.plan is None and crew.size == 1):
            return KeptModel(self.model, crew.ranks)
        options = Options(trial=None) if plan.plan is not None else Options()
        if plan.plan is None and not self._settings.colocate:
            options = Options(method=DATA_PARALLEL)
        try:
            handle = mosaic.colocate(
                self.model, sample, plan=plan.plan, exclude=self._settings.exclude, options=options
            )
        except UnsupportedModelError as error:
            raise _for_recipe(error) from error
        if plan.plan is None:
            self.plan = choice.stored_of_ranks(handle, plan.key, plan.why)
            if crew.rank == 0:
                save(self.plan, self._settings.plan)
        return handle

    # State.

    def _made(self) -> Trainee:
        program, model = self._program, self.model
        optimizers, schedulers = program.optimizers(model, self._settings.num_steps)
        return Trainee(
            model=model,
            keeper=self.handle,
            optimizers=optimizers,
            schedulers=schedulers,
            scaler=program.make_scaler() if program.make_scaler is not None else None,
            companions=dict(program.make_companions(model)) if program.make_companions is not None else {},
        )

    def _environment(self) -> str:
        """Says what is not as it was when the day began; empty where nothing is."""
        settings, crew = self._settings, self._crew
        here = environment_here(crew.device, num_ranks=crew.size, program=settings.program)
        if not settings.environment.is_file():
            if crew.rank == 0:
                save(here, settings.environment)
            return ""
        before = load(Environment, settings.environment)
        return "; ".join(here.differences(replace(before, num_ranks=crew.size) if settings.exact else before))

    def _begin(self) -> tuple[int, DayNotes, Any]:
        """Loads the day's last checkpoint, or begins from the champion; returns step, notes and the data's state."""
        settings, keeper = self._settings, self.handle
        found = self._load()
        if found is not None:
            notes = DayNotes(**found.extra["notes"])
            if self._differences and notes.differs_from_step is None:
                notes = replace(notes, differs_from_step=found.step, differs_because=self._differences)
            states = found.extra["data"]
            return found.step, notes, states[self._crew.rank] if self._crew.rank < len(states) else None
        notes = DayNotes(loaded=self._start(), rejects={})
        if self._crew.rank == 0:
            count = settings.loop.keep + 2
            model_bytes = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
            check_room(
                settings.loop.checkpoints,
                checkpoint_bytes=self.checkpoint_bytes,
                count=count,
                more_bytes=2 * model_bytes,
            )
        extra = {"notes": asdict(notes), "data": [None] * self._crew.size}
        keeper.save(settings.loop.checkpoints, step=0, extra=extra, **self._trainee.belongings)
        return 0, notes, None

    def _load(self) -> Loaded | None:
        """Loads the newest checkpoint that is whole; where all are damaged, the day begins anew, with the same bits."""
        folder = self._settings.loop.checkpoints
        try:
            return self.handle.load(folder, fall_back=True, missing_ok=True, **self._trainee.belongings)
        except InvalidCheckpointError:
            if not all(damage_of(each.path) for each in checkpoints_in(folder)):
                raise
            _LOG.warning("no checkpoint in %s is whole; the day begins anew", folder)
            return None

    def _start(self) -> str:
        """Takes the champion's weights and, where they are kept, its optimizers' moments; says what came of it."""
        settings, trainee = self._settings, self._trainee
        if settings.weights is None:
            return NEW_WEIGHTS
        if settings.start is not None and checkpoints_in(settings.start):
            try:  # an earlier checkpoint of its day would not be the champion
                found = self.handle.load(
                    settings.start,
                    optimizer=trainee.optimizers,
                    companions=trainee.companions,
                    partial=True,
                    new_run=True,
                )
            except InvalidCheckpointError as error:
                _LOG.warning("%s; the day begins from the champion's weights, without its optimizers' state", error)
            else:
                assert found is not None
                return _said("weights and the optimizers' state of the champion", found.new, found.gone, found.changed)
        overlap = self.handle.load_weights(settings.weights, partial=True)
        for companion in trainee.companions.values():
            companion.load_state_dict(self.model.state_dict(), strict=False)
        return _said("weights of the champion", overlap.new, overlap.gone, overlap.changed)


def device_of(name: str, rank: int) -> torch.device:
    """Returns where a rank trains: ``cpu``, ``cuda``, or ``auto`` for the GPU if there is one."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def end_ranks() -> None:
    """Ends the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _read(path: Path | None) -> StoredPlan | None:
    if path is None or not path.is_file():
        return None
    try:
        return load(StoredPlan, path)
    except InvalidFileError as error:
        _LOG.warning("%s; it is planned anew", error)
        return None


def _for_recipe(error: UnsupportedModelError) -> UnsupportedModelError:
    return UnsupportedModelError(f"{error}; in [budget] that is exclude; or set ranks_exact = true, or ranks = 1")


def _said(what: str, new: Iterable[str], gone: Iterable[str], changed: Iterable[str]) -> str:
    parts = [
        f"{label}: {', '.join(names)}" for label, names in (("new", new), ("gone", gone), ("changed", changed)) if names
    ]
    return "; ".join((what, *parts))
