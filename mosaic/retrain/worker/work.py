"""The work of a worker: a day with its recipe, the user's functions, and their settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mosaic.artifact import load
from mosaic.checkpoint.folder import sha256_of
from mosaic.retrain import versions
from mosaic.retrain.data_check import DayFigures
from mosaic.retrain.folder import DayFolder, Folder, load_of_earlier_day
from mosaic.retrain.recipe import Recipe
from mosaic.train.budget import DaySettings
from mosaic.train.choice import drift_of
from mosaic.train.data.positions import CYCLE, PositionStream, Source
from mosaic.train.data.samples import Samples, is_iterable
from mosaic.train.data.sources import Sources, check_unchanged, trained_rows
from mosaic.train.day import device_of
from mosaic.train.program import Program
from mosaic.train.records import StoredPlan, Trained
from mosaic.train.worker_group import PipelineGroup, WorkerGroup


@dataclass(frozen=True)
class Work:
    folder: Folder
    """The retraining folder."""
    day: DayFolder
    """The day."""
    recipe: Recipe
    """The recipe."""

    @cached_property
    def program(self) -> Program:
        recipe = self.recipe
        return Program.load(
            {
                "make_model": recipe.model,
                "make_dataset": recipe.data,
                "loss": recipe.loss,
                "score": recipe.score,
                "make_optimizer": recipe.optimizer,
                "make_companions": recipe.companions,
                "update_companions": recipe.update_companions,
                "collate": recipe.collate,
                "make_scaler": recipe.scaler,
            },
            self.folder.path,
        )

    @property
    def program_file(self) -> Path:
        return self.folder.path / self.recipe.model.partition(":")[0]

    @cached_property
    def sources(self) -> Sources:
        return load(Sources, self.day.sources)

    def samples(self) -> Samples | Callable[[], Iterable[Any]]:
        """Opens the day's data without held-out rows; for an iterable data set, returns a function that opens it."""
        sources = self.sources
        check_unchanged(self.folder.path, sources)
        datasets, streamed = [], []
        for record in sources.sources:
            if record.units:
                data = self.program.make_dataset(self.folder.path / record.path, True)
                if is_iterable(data):
                    return partial(self.program.make_dataset, self.folder.path / record.path, True)
                datasets.append(trained_rows(record, data, sources))
                share = Fraction(record.units, CYCLE)
                streamed.append(Source(name=record.name, rows=record.trained, share=share))
        return Samples(datasets, PositionStream(streamed, sources.seed))

    def group(self) -> WorkerGroup:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        device = device_of(self.recipe.device, rank)
        kind = PipelineGroup if self.recipe.budget.pipeline else WorkerGroup
        return kind(device, rank, size)

    def settings(self, group: WorkerGroup, until: float | None) -> DaySettings:
        """Returns the settings of the training; ``until`` is its deadline on the clock of ``time.monotonic()``."""
        budget, state = self.recipe.budget, self.day.state
        champion = None
        if state.parent is not None and not self._begins_fresh():
            champion = versions.find(self.folder, state.parent)
        start = self.folder.day(champion.card.day).checkpoints if champion is not None else None
        before = [day for day in self.folder.days() if day.plan.is_file() and day.path.name < state.day]
        stored = load_of_earlier_day(StoredPlan, before[-1].plan) if before else None
        last = load_of_earlier_day(Trained, before[-1].trained) if before else None
        return DaySettings(
            budget=replace(budget, batch=self.sources.batch, seed=self.sources.seed),
            num_steps=self.sources.num_steps,
            max_unreadable=self.recipe.sources.max_unreadable,
            exact_data=self.recipe.sources.exact,
            modalities=", ".join(sorted(load(DayFigures, self.day.figures).modalities)),
            program=sha256_of(self.program_file),
            until=until,
            checkpoints=self.day.checkpoints,
            metrics=self.day.metrics if group.rank == 0 else None,
            environment=self.day.environment,
            plan=self.day.plan,
            profile=self.day.profile,
            plan_before=before[-1].plan if stored is not None else None,
            drift=drift_of(stored, last.step_ms if last is not None else None),
            start=start,
            weights=champion.weights if champion is not None else None,
        )

    def _begins_fresh(self) -> bool:
        """Returns True if new weights are due: warm starts lose the ability to learn (Ash & Adams 2020)."""
        interval = self.recipe.budget.fresh_start_every
        promoted = sum(day.state.outcome == "promoted" for day in self.folder.days())
        return interval > 0 and promoted > 0 and promoted % interval == 0
