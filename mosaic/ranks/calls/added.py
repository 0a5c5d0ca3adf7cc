"""Arguments that a call has and the sample's step had not: those that hold no rows go along.

transformers' Trainer, for one, hands the number of tokens of a whole batch through a model into its language model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mosaic.engine.calls.structure import flatten


@dataclass(frozen=True, slots=True)
class WithAdded:
    """Makes a module's own call with keyword arguments that are not routed."""

    run: Callable[..., Any]
    """Makes the call."""
    added: Mapping[str, Any]
    """By name; the same on all ranks that call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes it."""
        return self.run(*args, **kwargs, **self.added)


def put_aside(
    run: Callable[..., Any], kwargs: dict[str, Any], known: Collection[str]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns what makes a module's call with those arguments that hold no rows, and the other ones.

    Args:
        run: Makes the call.
        kwargs: Its keyword arguments.
        known: Names of those in the sample's step.
    """
    added = {name: value for name, value in kwargs.items() if name not in known and _holds_no_rows(value)}
    if not added:
        return run, kwargs
    return WithAdded(run, added), {name: value for name, value in kwargs.items() if name not in added}


def said_by(run: Callable[..., Any]) -> str:
    """Returns a text for what was put aside, which has to be the same on all ranks; empty for nothing.

    Of tensors it has shape and type, since reading a value would make the host wait for a GPU.
    """
    if not isinstance(run, WithAdded):
        return ""
    leaves = [
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(run.added)[0]
    ]
    return f"{sorted(run.added)} {leaves}"


def _holds_no_rows(value: Any) -> bool:
    return all(
        not isinstance(leaf, torch.Tensor) or (not leaf.dim() and not leaf.requires_grad) for leaf in flatten(value)[0]
    )
