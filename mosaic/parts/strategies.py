"""Running a layer so that its activations are kept, or made again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mosaic.find.random_numbers import RandomState, python_state

Layer = Callable[..., Any]
Again = Callable[[], AbstractContextManager[Any]]
"""Returns a block for one of both runs of a layer that is made again."""


def without_cache(value: Any) -> Any:
    """Returns an argument, or None for keys and values of earlier tokens, as transformers' caches keep them.

    Training needs none, and a layer that runs a second time would find them full.
    """
    return None if is_cache(value) else value


def is_cache(value: Any) -> bool:
    """Whether an argument is such a cache."""
    return hasattr(value, "get_seq_length")


def repeatable(layer: Layer, buffers: Sequence[torch.Tensor]) -> Layer:
    """Returns a layer whose second run does what the first one did, although it changes what it reads.

    Args:
        layer: To be called twice at most.
        buffers: Its own. The second run leaves them as they are, and numpy's and Python's generators too.
    """
    first: list[tuple[list[torch.Tensor], RandomState]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        now = [one.detach().clone() for one in buffers], python_state()
        if not first:
            first.append(now)
            return layer(*args, **kwargs)
        _put_back(buffers, first[0])
        try:
            return layer(*args, **kwargs)
        finally:
            _put_back(buffers, now)

    return run


@torch.no_grad()
def _put_back(buffers: Sequence[torch.Tensor], state: tuple[Sequence[torch.Tensor], RandomState]) -> None:
    for buffer, value in zip(buffers, state[0], strict=True):
        buffer.copy_(value)
    state[1].restore()


STRATEGIES = ("keep", "recompute")
"""What may become of a layer's activations."""


def run_layer(
    strategy: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], again: Again = nullcontext
) -> Any:
    """Runs a layer.

    Args:
        strategy: One of ``STRATEGIES``.
        layer: Its forward.
        args: Of it.
        kwargs: Of it.
        again: For both of its runs where it is made again, the second of which may be on another thread.

    Raises:
        ValueError: The strategy is none of ``STRATEGIES``.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r}; use one of {', '.join(STRATEGIES)}")
    if strategy == "keep":
        return layer(*args, **kwargs)
    args = tuple(map(without_cache, args))
    kwargs = {name: without_cache(value) for name, value in kwargs.items()}
    return checkpoint(layer, *args, use_reentrant=False, context_fn=lambda: (again(), again()), **kwargs)
