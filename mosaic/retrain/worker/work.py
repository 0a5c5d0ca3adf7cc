"""The work of a worker: a day with its recipe, its data, and the functions of the user's file."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.artifact import load
from mosaic.errors import MosaicError
from mosaic.retrain import versions
from mosaic.retrain.folder import DayFolder, Folder
from mosaic.retrain.recipe import Budget, Recipe
from mosaic.retrain.records import Sources
from mosaic.user_file import import_file

WARM_UP_SHARE = 0.05
"""Part of a day's steps over which the default optimizer's rate grows."""
_FUNCTIONS = {
    "make_model": ("model", 0),
    "make_dataset": ("data", 2),
    "loss": ("loss", 2),
    "score": ("score", 2),
    "make_optimizer": ("optimizer", 2),
    "make_companions": ("companions", 1),
    "update_companions": ("update_companions", 2),
    "collate": ("collate", 1),
    "make_scaler": ("scaler", 0),
}
"""Key in the recipe and number of arguments of each function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Functions of the user's file; see ``mosaic.retrain.recipe.Recipe``."""

    make_model: Callable[[], nn.Module]
    make_dataset: Callable[[Path, bool], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    score: Callable[[nn.Module, Any], Mapping[str, Any]]
    make_optimizer: Callable[[nn.Module, int], Any] | None = None
    make_companions: Callable[[nn.Module], Mapping[str, nn.Module]] | None = None
    update_companions: Callable[[nn.Module, Mapping[str, nn.Module]], None] | None = None
    collate: Callable[[Sequence[Any]], Any] | None = None
    make_scaler: Callable[[], Any] | None = None

    @staticmethod
    def load(recipe: Recipe, folder: Path) -> Program:
        """Loads the functions that a recipe names."""
        modules: dict[str, Any] = {}
        functions: dict[str, Any] = {}
        for field, (key, num_arguments) in _FUNCTIONS.items():
            if (where := getattr(recipe, key)) is None:
                continue
            file, _, name = where.partition(":")
            if file not in modules:
                modules[file] = import_file(folder / file)
            functions[field] = function = getattr(modules[file], name, None)
            if not callable(function):
                raise MosaicError(f"{where}: {file} has no function {name!r}; define it, or name another")
            try:
                inspect.signature(function).bind(*range(num_arguments))
            except TypeError as error:
                raise MosaicError(f"{where} is called with {num_arguments} positional arguments: {error}") from error
            except ValueError:  # some builtins have no signature
                pass
        return Program(**functions)

    def optimizers(self, model: nn.Module, num_steps: int) -> tuple[tuple[Optimizer, ...], tuple[Any, ...]]:
        """Makes the optimizers and schedulers of a day."""
        returned = (self.make_optimizer or _default_optimizer)(model, num_steps)
        schedulers: Any = ()
        if isinstance(returned, tuple) and len(returned) == 2 and not isinstance(returned[1], Optimizer):
            returned, schedulers = returned
        optimizers = tuple(returned) if isinstance(returned, list | tuple) else (returned,)
        schedulers = tuple(schedulers) if isinstance(schedulers, list | tuple) else (schedulers,)
        wrong = [type(item).__name__ for item in optimizers if not isinstance(item, Optimizer)]
        wrong += [type(item).__name__ for item in schedulers if not hasattr(item, "step")]
        if wrong or not optimizers:
            raise MosaicError(
                f"make_optimizer returned {', '.join(wrong) or 'nothing'}; return an optimizer, a list of them, or "
                "(optimizers, schedulers)"
            )
        return optimizers, schedulers


def _default_optimizer(model: nn.Module, num_steps: int) -> tuple[Optimizer, Any]:
    """AdamW whose rate grows and falls once a day, as continual training needs (arXiv:2403.08763)."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    warm = max(1, round(num_steps * WARM_UP_SHARE))
    up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (warm + 1), total_iters=warm)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_steps - warm), eta_min=1e-5)
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], [warm])


@dataclass(frozen=True)
class Work:
    folder: Folder
    day: DayFolder
    recipe: Recipe

    @cached_property
    def program(self) -> Program:
        return Program.load(self.recipe, self.folder.path)

    @cached_property
    def sources(self) -> Sources:
        return load(Sources, self.day.sources)

    @cached_property
    def budget(self) -> Budget:
        """The recipe's budget, with the batch and the seed that the day began with."""
        return replace(self.recipe.budget, batch=self.sources.batch, seed=self.sources.seed)

    @cached_property
    def device(self) -> torch.device:
        name = self.recipe.device
        if name == "cuda" and not torch.cuda.is_available():
            raise MosaicError("device = 'cuda', and torch finds no GPU here; see `mosaic doctor`, or write 'auto'")
        if name != "cpu" and torch.cuda.is_available():
            rank = int(os.environ.get("RANK", "0"))
            device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))
            torch.cuda.set_device(device)
            return device
        return torch.device("cpu")

    def dataset(self, path: str, *, train: bool) -> Any:
        """Opens a data folder, named relative to the recipe's; raises MosaicError unless its rows can be indexed."""
        make_dataset = self.program.make_dataset
        try:
            data = make_dataset(self.folder.path / path, train)
        except (MemoryError, MosaicError):
            raise
        except Exception as error:  # of any kind, from the user's function
            reason = f"{type(error).__name__}: {error}"
            raise MosaicError(f"{self.recipe.data} cannot open {path} ({reason}); mend it, or restore it") from error
        if not (hasattr(data, "__getitem__") and isinstance(data, Sized)):
            raise MosaicError(
                f"{self.recipe.data} returned a {type(data).__name__}, which cannot be indexed, and a day that was "
                "killed goes on by the numbers of rows; return a map-style Dataset, which has __len__ and __getitem__"
            )
        return data

    @property
    def start(self) -> versions.Version | None:
        """The version that the training starts from; None for new weights."""
        parent = self.day.state.parent
        return None if parent is None else versions.find(self.folder, parent)
