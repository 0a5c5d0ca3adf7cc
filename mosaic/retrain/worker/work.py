"""The work of a worker: a day with its recipe, its data, and the user's functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from mosaic.artifact import load
from mosaic.checkpoint.folder import sha256_of
from mosaic.retrain import versions
from mosaic.retrain.folder import DayFolder, Folder
from mosaic.retrain.recipe import Budget, Recipe
from mosaic.retrain.worker.group import WorkerGroup
from mosaic.retrain.worker.loader import Samples, is_iterable
from mosaic.retrain.worker.positions import PositionStream, Source
from mosaic.retrain.worker.program import Program
from mosaic.retrain.worker.sources import Sources, record_of, trained_rows


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
        return Program.load(self.recipe, self.folder.path)

    @property
    def program_digest(self) -> str:
        return sha256_of(self.folder.path / self.recipe.model.partition(":")[0])

    @cached_property
    def sources(self) -> Sources:
        return load(Sources, self.day.sources)

    @property
    def budget(self) -> Budget:
        """The recipe's budget, with the batch and the seed that the day began with."""
        return replace(self.recipe.budget, batch=self.sources.batch, seed=self.sources.seed)

    @cached_property
    def device(self) -> torch.device:
        name = self.recipe.device
        if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
            rank = int(os.environ.get("RANK", "0"))
            device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))
            torch.cuda.set_device(device)
            return device
        return torch.device("cpu")

    def group(self) -> WorkerGroup:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return WorkerGroup(self.device, rank, size, pipeline=self.recipe.budget.pipeline and size > 1)

    def samples(self) -> Samples | Callable[[], Iterable[Any]]:
        """Opens the day's data without held-out rows; for an iterable data set, returns a function that opens it.

        Raises:
            MosaicError: Files of the frozen list are gone, new, or of another size; names the first.
        """
        sources, root = self.sources, self.folder.path
        for each in (*sources.sources, sources.frozen):
            record_of(root, root / each.path, kind=each.kind, day=each.day, known={each.path: each})
        datasets, streamed = [], []
        for record in sources.sources:
            if record.samples:
                path = root / record.path
                data = self.program.make_dataset(path, True)
                if is_iterable(data):
                    return partial(self.program.make_dataset, path, True)
                datasets.append(trained_rows(record, data, sources))
                streamed.append(Source(name=record.name, rows=record.trained, samples=record.samples))
        return Samples(datasets, PositionStream(streamed, sources.seed))

    @property
    def start(self) -> versions.Version | None:
        """The version that the training starts from.

        None for new weights, which are also due after some promotions: warm starts lose the ability to learn (Ash &
        Adams 2020).
        """
        interval = self.recipe.budget.fresh_start_every
        promoted = sum(day.state.outcome == "promoted" for day in self.folder.days())
        parent = self.day.state.parent
        if parent is None or (interval > 0 and promoted > 0 and promoted % interval == 0):
            return None
        return versions.find(self.folder, parent)
