"""A day's training put together: data, model, plan, state of the last checkpoint, and then the loop."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import mosaic
from mosaic.artifact import load, save
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.checkpoint.kept_model import KeptModel
from mosaic.engine import Options
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.train import choice
from mosaic.train.choice import StoredPlan
from mosaic.train.crew import Crew, ExactCrew
from mosaic.train.environment import Environment
from mosaic.train.loader import BatchLoader
from mosaic.train.loop import Loop, LoopSettings, Trainee
from mosaic.train.program import Program
from mosaic.train.samples import Samples
from mosaic.train.seeds import seed_step
from mosaic.train.signals import StopRequests

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySettings:
    """What a day's training is told beside its data and its functions."""

    loop: LoopSettings
    """Of the loop."""
    batch: int
    """Samples of a step, over all ranks."""
    micro_batches: int
    """Into how many a rank cuts its part of the batch."""
    workers: int
    """Processes that read samples, for this rank."""
    ranks_exact: bool
    """Whether other numbers of ranks have to give the same bits."""
    colocate: bool
    """Whether Mosaic may run modules side by side."""
    start: Path | None
    """Checkpoints of the day that made the champion; None where there are none any more."""
    weights: Path | None
    """The champion's weights; None for new ones."""
    plan: Path
    """The day's ``plan.json``."""
    plan_before: Path | None
    """The one of the day before."""
    drift: str
    """Why the plan of the day before no longer fits, as its steps told; empty where it does."""
    environment: Path
    """The day's ``environment.json``."""
    program: str
    """SHA-256 of the user's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """``trained.json``: how a day's training ended."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    ended: str
    """``done``, ``window over``, or the name of a signal."""
    step: int
    """Steps that are done."""
    num_steps: int
    """Steps of the day."""
    step_ms: float | None
    """Median of the last process, in ms."""
    loaded: str
    """What the model started from, and what is new or gone in it."""
    differs_from_step: int | None
    """First step that may have other bits than an undisturbed run; None for none."""
    differs_because: str
    """Why."""
    messages: tuple[str, ...]
    """What the morning should know."""


def train_day(
    program: Program, samples: Samples, settings: DaySettings, crew: Crew, told: StopRequests, *, to: int | None = None
) -> tuple[nn.Module, Trained]:
    """Trains a day from where it stands; every rank calls it.

    Args:
        program: The user's functions.
        samples: The day's data.
        settings: All else.
        crew: The ranks.
        told: Listens to signals.
        to: Stop after this step; the day's last by default.

    Returns:
        The plain, whole model, and how it ended.

    Raises:
        MosaicError: Data, plan or checkpoints are not as they have to be, or training failed; says what.
    """
    seed = settings.loop.seed
    seed_step(seed, 0, 0)
    model = program.make_model().to(crew.device)
    _broadcast_alike(crew)
    batch = crew.moved(_first_micro_batch(samples, settings, crew))
    stored = _plan_of_day(program, model, batch, settings, crew)
    torch.set_num_threads(stored.threads)
    handle = _colocated(program, model, batch, stored, settings, crew)
    differences = _environment(settings, crew, stored)
    optimizers, schedulers = program.optimizers(model, settings.loop.num_steps)
    trainee = Trainee(
        model=model,
        keeper=handle,
        optimizers=optimizers,
        schedulers=schedulers,
        scaler=program.make_scaler() if program.make_scaler is not None else None,
        companions=dict(program.make_companions(model)) if program.make_companions is not None else {},
    )
    step, kept = _begin(trainee, settings)
    model.train()
    loop = Loop(program, trainee, settings.loop, crew, told, step=step)
    loop.messages.extend(kept["messages"])
    loop.loaded = kept["loaded"]
    loop.differs = kept["differs"] or ([step, "; ".join(differences)] if differences and step else None)

    def batches(first: int) -> Any:
        return _loader(samples, settings, crew, first)

    ended = loop.run(batches, to=to)
    if loop.step_ms is not None and stored.step_ms is None and crew.rank == 0:
        save(replace(stored, step_ms=loop.step_ms), settings.plan)
    plain = _plain(handle, model)
    differs = loop.differs or [None, ""]
    return plain, Trained(
        ended=ended,
        step=loop.step,
        num_steps=settings.loop.num_steps,
        step_ms=loop.step_ms,
        loaded=loop.loaded,
        differs_from_step=differs[0],
        differs_because=differs[1],
        messages=tuple(loop.messages),
    )


def _first_micro_batch(samples: Samples, settings: DaySettings, crew: Crew) -> Any:
    with _loader(samples, replace(settings, workers=0), crew, 0) as loader:
        return next(iter(loader)).micro_batches[0]


def _loader(samples: Samples, settings: DaySettings, crew: Crew, first_step: int) -> BatchLoader:
    return BatchLoader(
        samples,
        batch=settings.batch,
        rank=crew.rank,
        num_ranks=crew.size,
        micro_batches=settings.micro_batches,
        workers=settings.workers,
        first_step=first_step,
        num_steps=settings.loop.num_steps,
    )


def _plan_of_day(program: Program, model: nn.Module, batch: Any, settings: DaySettings, crew: Crew) -> StoredPlan:
    """Returns the plan that the day runs, choosing it where there is none yet; None of it trains."""
    key = choice.key_of(model, batch, crew.device, crew.size)
    there = _read(settings.plan)
    if there is not None and not key.differences(there.key):
        return there
    if there is not None:
        why = f"within the day: {key.differences(there.key)}"
    else:
        before = _read(settings.plan_before)
        why = choice.reason_to_plan(key, before, settings.drift)
        if not why and before is not None:
            there = replace(before, why="")
    if there is None or why:
        if not settings.colocate or settings.ranks_exact or crew.size > 1:
            said = "the plain loop runs: the recipe asks for it" if crew.size == 1 or settings.ranks_exact else ""
            there = StoredPlan(
                plan=None, threads=torch.get_num_threads(), key=key, said=said, speedup=None, step_ms=None, why=why
            )
        else:
            seed_step(settings.loop.seed, 0, 0)
            there = choice.choose_by_trial(program.make_model().to(crew.device), batch, program.loss, key, why)
    if crew.rank == 0 and crew.size == 1:
        save(there, settings.plan)
    return there


def _read(path: Path | None) -> StoredPlan | None:
    if path is None or not path.is_file():
        return None
    try:
        return load(StoredPlan, path)
    except InvalidFileError as error:
        _LOG.warning("%s; the day is planned anew", error)
        return None
