"""Running a layer so that its activations are kept, made again in backward, or kept in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mosaic.errors import UnsplittableError

Layer = Callable[..., Any]


def _keep(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(*args, **kwargs)


def _recompute(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for value in (*args, *kwargs.values()):
        if hasattr(value, "get_seq_length"):  # the protocol of transformers' caches
            raise UnsplittableError(
                f"a layer that is to be recomputed gets a {type(value).__name__}, which its second run would fill "
                "again; call the model with use_cache=False, as training needs no keys and values of earlier tokens"
            )
    return checkpoint(layer, *args, use_reentrant=False, **kwargs)


def _offload(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return layer(*args, **kwargs)


STRATEGIES: dict[str, Callable[[Layer, tuple[Any, ...], dict[str, Any]], Any]] = {
    "keep": _keep,
    "recompute": _recompute,
    "selective": _recompute,
    "offload": _offload,
}
"""By name; ``selective`` recomputes the whole layer, which takes longer and keeps less than a plan says."""


def run_layer(strategy: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a layer.

    Raises:
        ValueError: There is no such strategy.
    """
    try:
        run = STRATEGIES[strategy]
    except KeyError:
        raise ValueError(f"strategy {strategy!r}; use one of {', '.join(STRATEGIES)}") from None
    return run(layer, args, kwargs)
