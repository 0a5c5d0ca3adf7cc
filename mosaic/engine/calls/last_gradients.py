"""The end of a module's backward, seen by the parameter that gets its gradient last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mosaic.engine.calls.placed_module import PlacedModule


class LastGradients:
    """Hooks on the first trainable parameter of each module that is watched."""

    def __init__(self) -> None:
        self._hooked: dict[str, tuple[torch.nn.Parameter, Any]] = {}

    def watch(self, site: PlacedModule, arrived: Callable[[], None]) -> bool:
        """Calls ``arrived`` whenever a backward of the module ends; returns False if no leaf gets a gradient."""
        known = self._hooked.get(site.name)
        if known is not None and known[0].requires_grad:
            return True
        # functional_call lends a module weights that are no leaves
        first = next((parameter for parameter in site.parameters if parameter.is_leaf), None)
        if first is None:
            return False
        if known is not None:
            known[1].remove()
        self._hooked[site.name] = (first, first.register_post_accumulate_grad_hook(lambda _: arrived()))
        return True

    def close(self) -> None:
        for _, hook in self._hooked.values():
            hook.remove()
        self._hooked.clear()
