"""Tensors that outlive a model's call though no module returned them: kept by a hook, a list or an attribute."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.structure import tensors_of


class Escapes(TorchFunctionMode):
    """Notes what is made in modules and takes a gradient; made anew for each run of a model.

    A loss that uses such a tensor goes backward through the graph of a branch from outside, while its lane does.

    Args:
        running: The names of the modules that are running, the innermost last; kept by somebody else.
    """

    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()
        self._running = running
        self._made: list[tuple[weakref.ref[torch.Tensor], tuple[str, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged."""
        result = func(*args, **(kwargs or {}))
        if self._running:
            for tensor in tensors_of(result):
                if tensor.requires_grad and not tensor.is_leaf:
                    self._made.append((weakref.ref(tensor), tuple(self._running)))
        return result

    def obstacles(self) -> dict[str, Obstacle]:
        """Returns for each module why no lane's thread can run it; to be asked once the run's own result is let go."""
        alive = {id(tensor): names for ref, names in self._made if (tensor := ref()) is not None}
        found = {}
        for key in _held_by_python(alive.keys()) if alive else ():
            names = alive[key]
            where = f" (made in {names[-1]})" if len(names) > 1 else ""
            for name in names:
                found[name] = Obstacle(
                    f"a tensor made inside of it{where} is kept after its call, by a hook, a list or an attribute",
                    todo="return it, keep tensor.detach(), or leave the module out: colocate(..., exclude=[...])",
                )
        return found


def _held_by_python(keys: Collection[int]) -> set[int]:
    """Returns which objects, by id, some object of Python's refers to: not only the graph that saved them."""
    return {key for holder in gc.get_objects() for key in map(id, gc.get_referents(holder)) if key in keys}
