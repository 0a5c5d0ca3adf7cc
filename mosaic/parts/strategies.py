"""Running a layer so that its activations are kept, made again in backward, or kept in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mosaic.parts.random_state import PythonState, python_state, set_python_state

Layer = Callable[..., Any]
Again = Callable[[], AbstractContextManager[Any]]
"""Returns a block in which a layer's forward is run a second time: what the first one ran in, of its own making."""


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
    first: list[tuple[list[torch.Tensor], PythonState]] = []

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
def _put_back(buffers: Sequence[torch.Tensor], state: tuple[Sequence[torch.Tensor], PythonState]) -> None:
    for buffer, value in zip(buffers, state[0], strict=True):
        buffer.copy_(value)
    set_python_state(state[1])


def _keep(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], again: Again) -> Any:
    return layer(*args, **kwargs)


def _recompute(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], again: Again) -> Any:
    args = tuple(map(without_cache, args))
    kwargs = {name: without_cache(value) for name, value in kwargs.items()}
    return checkpoint(layer, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again()), **kwargs)


def _offload(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], again: Again) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return layer(*args, **kwargs)


STRATEGIES: dict[str, Callable[[Layer, tuple[Any, ...], dict[str, Any], Again], Any]] = {
    "keep": _keep,
    "recompute": _recompute,
    "selective": _recompute,
    "offload": _offload,
}
"""By name; ``selective`` recomputes the whole layer, which takes longer and keeps less than a plan says."""

RUNS_TWICE = frozenset(("recompute", "selective"))
"""Those whose second run has to find the layer's arguments as the first one did."""


def run_layer(
    strategy: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], again: Again = nullcontext
) -> Any:
    """Runs a layer.

    Args:
        strategy: A name of ``STRATEGIES``.
        layer: Its forward.
        args: Of it.
        kwargs: Of it.
        again: For its second run in backward, which may be on another thread.

    Raises:
        ValueError: There is no such strategy.
    """
    try:
        run = STRATEGIES[strategy]
    except KeyError:
        raise ValueError(f"strategy {strategy!r}; use one of {', '.join(STRATEGIES)}") from None
    return run(layer, args, kwargs, again)
