"""The user's functions, loaded and checked: model, data, loss, scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.errors import MosaicError
from mosaic.user_file import import_file

WARM_UP_SHARE = 0.05
"""Part of a day's steps over which the default optimizer's rate grows."""


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
    def load(names: Mapping[str, str | None], folder: Path) -> Program:
        """Loads functions by their names.

        Args:
            names: ``FILE:NAME`` for each of this class's fields, or None for optional fields.
            folder: Folder of the files.

        Raises:
            MosaicError: A file or function is missing, or takes other arguments.
        """
        modules: dict[str, Any] = {}
        functions: dict[str, Any] = {}
        for field, where in names.items():
            if where is None:
                continue
            file, _, name = where.partition(":")
            if file not in modules:
                modules[file] = import_file(folder / file)
            functions[field] = _function(modules[file], where, name, _TAKES[field])
        return Program(**functions)

    def optimizers(self, model: nn.Module, num_steps: int) -> tuple[tuple[Optimizer, ...], tuple[Any, ...]]:
        """Makes the optimizers and schedulers of a day.

        Raises:
            MosaicError: The user's function returns something else.
        """
        if self.make_optimizer is None:
            return _default_optimizer(model, num_steps)
        returned = self.make_optimizer(model, num_steps)
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


_TAKES = {
    "make_model": 0,
    "make_dataset": 2,
    "loss": 2,
    "score": 2,
    "make_optimizer": 2,
    "make_companions": 1,
    "update_companions": 2,
    "collate": 1,
    "make_scaler": 0,
}
"""Number of arguments of each function."""


def _function(module: Any, where: str, name: str, count: int) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        raise MosaicError(f"{where}: {Path(module.__file__).name} has no function {name!r}; define it, or name another")
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError as error:
        raise MosaicError(f"{where} is called with {count} argument{'s' * (count != 1)}: {error}") from error
    except ValueError:  # some builtins have no signature
        pass
    return function


def _default_optimizer(model: nn.Module, num_steps: int) -> tuple[tuple[Optimizer, ...], tuple[Any, ...]]:
    """AdamW whose rate grows and falls once a day, as continual training needs (arXiv:2403.08763)."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    warm = max(1, round(num_steps * WARM_UP_SHARE))
    up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (warm + 1), total_iters=warm)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_steps - warm), eta_min=1e-5)
    return (optimizer,), (torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], [warm]),)
