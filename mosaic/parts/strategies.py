"""Activation strategies of a layer: keep or recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mosaic.find.random_numbers import RandomState, python_state

Layer = Callable[..., Any]


def without_cache(value: Any) -> Any:
    """Returns an argument, or None for a cache, which the second run of a layer would find full."""
    return None if is_cache(value) else value


def is_cache(value: Any) -> bool:
    """Returns True for a cache of keys and values, as in transformers."""
    return hasattr(value, "get_seq_length")


def repeatable(layer: Layer, buffers: Sequence[torch.Tensor]) -> Layer:
    """Returns a layer whose second run repeats the first, although it changes buffers, arguments or generators."""
    first: list[tuple[list[torch.Tensor], RandomState]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        now = [buffer.detach().clone() for buffer in buffers], python_state()
        if not first:
            first.append(now)
            return layer(*args, **kwargs)
        _restore(buffers, first[0])
        try:
            return layer(*args, **kwargs)
        finally:
            _restore(buffers, now)

    return run


@torch.no_grad()
def _restore(buffers: Sequence[torch.Tensor], state: tuple[Sequence[torch.Tensor], RandomState]) -> None:
    for buffer, value in zip(buffers, state[0], strict=True):
        buffer.copy_(value)
    state[1].restore()


STRATEGIES = ("keep", "recompute")
"""Names of activation strategies."""


def run_layer(strategy: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a layer with one of ``STRATEGIES``."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r}; use one of {', '.join(STRATEGIES)}")
    if strategy == "keep":
        return layer(*args, **kwargs)
    args = tuple(map(without_cache, args))
    kwargs = {name: without_cache(value) for name, value in kwargs.items()}
    return checkpoint(layer, *args, use_reentrant=False, **kwargs)
