"""A day's training: data, model, plan, state of the last checkpoint, and the loop.

The plan of a day is tried before its first step, stored, and reused unchanged by every restart. A trial inside the loop
would take steps at several thread counts, and a restart would choose by the clock again. The trial therefore runs on a
model of its own, which is discarded. On several ranks ``colocate`` tries plans itself, before the loop.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import mosaic
from mosaic.artifact import commit, fingerprint, load, save
from mosaic.backends.host.backend import cpu_name
from mosaic.checkpoint.checkpointer import Checkpointer, Loaded
from mosaic.checkpoint.folder import checkpoints_in, damage_of, sha256_of
from mosaic.checkpoint.tensors import Overlap
from mosaic.engine import Handle, Options
from mosaic.errors import InvalidCheckpointError, MosaicError, UnsupportedModelError
from mosaic.ranks.session import find_with_rows
from mosaic.retrain.data_check import DayFigures
from mosaic.retrain.folder import load_if_intact
from mosaic.retrain.records import NEW_WEIGHTS, DayNotes, Environment, PlanKey, StoredPlan, Trained, differences
from mosaic.retrain.worker.data import open_samples
from mosaic.retrain.worker.loader import BatchCut, BatchLoader, RejectCount
from mosaic.retrain.worker.loop import Loop, TrainState, WorkerGroup
from mosaic.retrain.worker.positions import seed_step
from mosaic.retrain.worker.work import Work
from mosaic.retrain.workers import StopRequests
from mosaic.solver.runnable import DATA_PARALLEL

_LOG = logging.getLogger(__name__)
MAX_TRIAL_STEPS = 600
"""Most steps of a trial, which ends by itself earlier (120 steps)."""


class Training:
    """A day that is ready to train; every rank constructs its own.

    ``until`` is its deadline on the clock of ``time.monotonic()``; None for none.
    """

    def __init__(self, work: Work, group: WorkerGroup, until: float | None = None) -> None:
        self._work = work
        self._group = group
        self._until = until
        self._samples = open_samples(work)
        self.model = self._new_model()
        batch = self._first_batch()
        self.plan, plan_change = self._plan_of_day(batch)
        torch.set_num_threads(self.plan.threads)
        self.handle = self._place(batch)
        program, model = work.program, self.model
        optimizers, schedulers = program.optimizers(model, work.sources.num_steps)
        self._state = TrainState(
            model=model,
            keeper=self.handle,
            optimizers=optimizers,
            schedulers=schedulers,
            scaler=program.make_scaler() if program.make_scaler is not None else None,
            companions=dict(program.make_companions(model)) if program.make_companions is not None else {},
        )
        if (name := work.recipe.export) is not None and name not in self._state.companions:
            raise MosaicError(
                f"export = {name!r} is none of the companions {', '.join(self._state.companions)}; name one"
            )
        self._changes = "; ".join(filter(None, (plan_change, self._environment_change())))

    def train(self, stop: StopRequests, *, to: int | None = None) -> Trained:
        """Trains from the last checkpoint to the day's last step, to ``to``, or to a stop signal."""
        num_steps = self._work.sources.num_steps
        step, notes = self._begin()
        loop = self._loop(stop, step, notes)
        rejects = RejectCount(2 * self._work.recipe.check.max_unreadable)
        if self._group.rank == 0:  # a checkpoint adds the counts of all ranks
            rejects.resume(step * self._work.budget.batch, notes.rejects)
        with self._loader(range(step, num_steps), self._work.budget.workers, rejects) as batches:
            ended = loop.run(batches, min(to or num_steps, num_steps))
        return Trained(
            ended=ended,
            step=loop.step,
            num_steps=num_steps,
            digest=self.handle.digest(),
            notes=loop.notes,
        )

    def leave(self) -> None:
        """Restores the plain model on every rank."""
        if isinstance(self.handle, mosaic.Handle):
            self.handle.remove()

    def export(self, path: Path, name: str | None) -> nn.Module:
        """Writes the model, or the EMA model of a name, as one plain file; leaves, and returns it."""
        if name is None:
            self.handle.export(path)
        else:  # each rank holds averages of its own weights
            Checkpointer(self._state.companions[name], getattr(self.handle, "world", None)).export(path)
        self.leave()
        return self.model if name is None else self._state.companions[name]

    def try_step(self) -> float:
        """Takes one step for a check and discards it; returns its loss."""
        loop = self._loop(StopRequests(), 0, DayNotes(loaded="", rejects={}))
        with self._loader(range(1)) as batches:
            return self._group.mean_loss(loop.take_step(next(batches)))

    def check_for_ranks(self) -> None:
        """Raises UnsupportedModelError if several ranks could not train the plain model that ``leave`` restores."""
        batch, model = self._first_batch(), self.model
        try:
            find_with_rows(model, lambda: self._work.program.loss(model, batch), None, self._work.budget.exclude)
        except UnsupportedModelError as error:
            raise _for_recipe(error) from error

    def _loop(self, stop: StopRequests, step: int, notes: DayNotes) -> Loop:
        self.model.train()
        return Loop(
            work=self._work,
            state=self._state,
            group=self._group,
            stop=stop,
            until=self._until,
            step=step,
            notes=notes,
        )

    def _new_model(self) -> nn.Module:
        seed_step(self._work.budget.seed, 0, 0)
        return self._work.program.make_model().to(self._group.device)

    def _first_batch(self) -> Any:
        """Returns this rank's first micro-batch, on its device."""
        with self._loader(range(1)) as batches:
            return self._group.moved(next(batches).micro_batches[0].data)

    def _loader(self, steps: range, workers: int = 0, rejects: RejectCount | None = None) -> BatchLoader:
        group, collate, budget = self._group, self._work.program.collate, self._work.budget
        cut = BatchCut(batch=budget.batch, num_ranks=group.size, rank=group.rank, micro_batches=budget.micro_batches)
        rejects, pin = rejects or RejectCount(1.0), group.device.type == "cuda"
        return BatchLoader(self._samples, cut, steps, workers=workers, collate=collate, pin=pin, rejects=rejects)

    # The plan.

    def _plan_of_day(self, batch: Any) -> tuple[StoredPlan, str]:
        """Returns the plan of the day, and the reason that it changed within the day; empty if it did not."""
        work, group, budget = self._work, self._group, self._work.budget
        key = _key_of(work, group, self.model, batch)
        plan, why, change = load_if_intact(StoredPlan, work.day.plan), "", ""
        if plan is not None:  # of an earlier start
            why = change = differences(key, plan.key)
            if not change:
                return plan, ""
        else:
            plan, why = _plan_of_day_before(work, key)
            if not why and plan is not None:
                return self._store(replace(plan, why="")), ""
        change = f"{change}, so it was planned anew" if change else ""
        if group.size > 1:
            return _stored(key, why, ""), change  # ``_place`` chooses
        if not budget.colocate:
            plan = _stored(key, why, "the recipe asks for the plain loop")
        else:
            plan = _choose_by_trial(work, self._new_model(), batch, key, why)
        return self._store(plan), change

    def _store(self, plan: StoredPlan) -> StoredPlan:
        self.plan = plan
        if self._group.rank == 0:
            save(plan, self._work.day.plan)
        return plan

    def _place(self, batch: Any) -> Checkpointer:
        """Places the model by the plan; several ranks choose a new plan here, before the first step."""
        plan = self.plan
        if plan.plan is None and self._group.size == 1:
            return Checkpointer(self.model)
        options = Options(trial=None) if plan.plan is not None else Options()
        if plan.plan is None and not self._work.budget.colocate:
            options = Options(method=DATA_PARALLEL)
        try:
            handle = mosaic.colocate(
                self.model,
                lambda: self._work.program.loss(self.model, batch),
                plan=plan.plan,
                exclude=self._work.budget.exclude,
                options=options,
            )
        except UnsupportedModelError as error:
            raise _for_recipe(error) from error
        if plan.plan is None:
            self._store(_stored(plan.key, plan.why, handle.describe(), handle))
        return handle

    # State.

    def _environment_change(self) -> str:
        """Describes the change of the environment since the day began; empty for none."""
        path, work = self._work.day.environment, self._work
        program = sha256_of(work.folder.path / work.recipe.program)
        here = environment_here(self._group.device, num_ranks=self._group.size, program=program)
        if path.is_file():
            return differences(here, load(Environment, path))
        if self._group.rank == 0:
            save(here, path)
        return ""

    def _begin(self) -> tuple[int, DayNotes]:
        """Loads the day's last checkpoint, or starts from the champion; returns step and notes."""
        checkpoint = self._load()
        if checkpoint is not None:
            notes = DayNotes(**checkpoint.extra["notes"])
            if self._changes and notes.differs_from_step is None:
                notes = replace(notes, differs_from_step=checkpoint.step, differs_because=self._changes)
            return checkpoint.step, notes
        notes = DayNotes(loaded=self._start(), rejects={})
        folder, extra = self._work.day.checkpoints, {"notes": asdict(notes)}
        self.handle.save(folder, step=0, extra=extra, **self._state.checkpointed)
        return 0, notes

    def _load(self) -> Loaded | None:
        """Loads the newest intact checkpoint; without one the day starts again, with the same bits."""
        folder = self._work.day.checkpoints
        try:
            return self.handle.load(folder, fall_back=True, missing_ok=True, **self._state.checkpointed)
        except InvalidCheckpointError:
            if not all(damage_of(checkpoint.path) for checkpoint in checkpoints_in(folder)):
                raise
            _LOG.warning("all checkpoints in %s are damaged; the day starts again", folder)
            return None

    def _start(self) -> str:
        """Loads the champion's weights and, if present, its optimizers' moments; describes the result."""
        champion, state = self._work.start, self._state
        if champion is None:
            return NEW_WEIGHTS
        folder = self._work.folder.day(champion.card.day).checkpoints
        if checkpoints_in(folder):
            try:  # no fall_back: an earlier checkpoint is not the champion
                step, optimizers, companions = champion.card.step, state.optimizers, state.companions
                self.handle.load(folder, step=step, optimizer=optimizers, companions=companions, new_run=True)
            except InvalidCheckpointError as error:
                _LOG.warning("%s; the day begins from the champion's weights, without its optimizers' state", error)
            else:
                return "weights and the optimizers' state of the champion"
        overlap = self.handle.load_weights(champion.weights, partial=True)
        for companion in state.companions.values():
            companion.load_state_dict(self.model.state_dict(), strict=False)
        return _description("weights of the champion", overlap)


def _key_of(work: Work, group: WorkerGroup, model: nn.Module, batch: Any) -> PlanKey:
    """Returns the key under which a plan for a model, a batch and a device is stored."""
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    leaves = [
        [pytree.keystr(path), list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__]
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
    ]
    is_cuda = group.device.type == "cuda"
    return PlanKey(
        model=fingerprint(parameters),
        batch=fingerprint(leaves),
        modalities=", ".join(sorted(load(DayFigures, work.day.figures).modalities)) or "none",
        device=torch.cuda.get_device_name(group.device) if is_cuda else f"cpu, {torch.get_num_threads()} threads",
        num_ranks=group.size,
        torch=torch.__version__,
        colocate=work.budget.colocate,
    )


def _plan_of_day_before(work: Work, key: PlanKey) -> tuple[StoredPlan | None, str]:
    """Returns the plan of the day before, and the reason to plan anew; empty if it fits."""
    days = [day for day in work.folder.days() if day.plan.is_file() and day.path.name < work.day.state.day]
    before = load_if_intact(StoredPlan, days[-1].plan) if days else None
    if before is None:
        return None, "this is the first day"
    why = differences(key, before.key)
    if not why and not before.is_measured:
        why = "other processes used the CPU when it was measured the day before"
    return before, why


def _choose_by_trial(work: Work, model: nn.Module, batch: Any, key: PlanKey, why: str) -> StoredPlan:
    """Tries plans of one rank on a model to discard afterwards; returns the fastest, and writes ``profile.json``."""
    loss, exclude = work.program.loss, work.budget.exclude
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    try:
        handle = mosaic.colocate(model, sample=lambda: loss(model, batch), exclude=exclude)
    except UnsupportedModelError as error:
        return _stored(key, why, f"nothing is colocated: {error}")
    try:
        for _ in range(MAX_TRIAL_STEPS):
            if not handle.is_trying:
                break
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle.profile is not None:
            save(handle.profile, work.day.profile)
        return _stored(key, why, handle.describe(), handle)
    finally:
        handle.remove()


def _stored(key: PlanKey, why: str, description: str, handle: Handle | None = None) -> StoredPlan:
    """Returns the record of the plan that a handle has chosen; without one, of a day that runs the plain loop."""
    on_ranks, trial_ms = key.num_ranks > 1, dict[str, float]()
    is_placed = handle is not None and (on_ranks or handle.active)
    if handle is not None and is_placed:
        trial_ms = {name: value for name, value in handle.metrics().items() if name.startswith("trial_ms/")}
    times_ms = list(trial_ms.values())
    plain_ms = max(times_ms, default=None) if on_ranks else trial_ms.pop("trial_ms/plain", None)
    return StoredPlan(
        plan=handle.plan if handle is not None and is_placed else None,
        threads=torch.get_num_threads(),
        key=key,
        description=description,
        speedup=plain_ms / min(trial_ms.values()) if plain_ms is not None and len(times_ms) > 1 else None,
        why=why,
        is_measured=handle is None or handle.profile is not None,
    )


def environment_here(device: torch.device, *, num_ranks: int, program: str) -> Environment:
    """Reads this process's environment; ``program`` is the SHA-256 of the user's file."""
    name = "cpu"
    if device.type == "cuda":
        version = Path("/proc/driver/nvidia/version")
        driver = version.read_text(encoding="utf-8").partition("\n")[0] if version.is_file() else "unknown"
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, driver {driver}"
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=np.__version__,
        mosaic=mosaic.__version__,
        commit=commit(),
        machine=f"{cpu_name()}, {platform.system()} {platform.release()}",
        device=name,
        threads=torch.get_num_threads(),
        num_ranks=num_ranks,
        tf32=torch.get_float32_matmul_precision() != "highest",
        program=program,
    )


def _for_recipe(error: UnsupportedModelError) -> UnsupportedModelError:
    return UnsupportedModelError(f"{error}; in [budget] that is exclude; or set ranks = 1")


def _description(source: str, overlap: Overlap) -> str:
    differing = (("new", overlap.new), ("gone", overlap.gone), ("changed", overlap.changed))
    return "; ".join((source, *(f"{label}: {', '.join(names)}" for label, names in differing if names)))
