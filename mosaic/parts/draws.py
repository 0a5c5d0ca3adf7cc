"""Random numbers that a module draws, recorded without drawing them, and drawn without the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Draw:
    """One operator that draws random numbers."""

    operator: Any
    leaves: tuple[Any, ...]
    """Its arguments; tensors have no data."""
    tree: Any
    """Tree of the arguments."""

    def repeat(self, device: torch.device) -> None:
        """Draws as many numbers, and discards them."""
        arguments = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device).fill_(1)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(arguments, self.tree)
        self.operator(*args, **kwargs)


class DrawsSeen(TorchDispatchMode):
    """Records random operators while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: list[Draw] = []

    def draws(self) -> Sequence[Draw]:
        """Returns the recorded operators in order."""
        return tuple(self._draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and records it if it draws."""
        if draws_random_numbers(func, args, kwargs or {}):
            leaves, tree = pytree.tree_flatten((args, kwargs or {}))
            self._draws.append(Draw(func, tuple(map(_without_data, leaves)), tree))
        return func(*args, **(kwargs or {}))


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if an operator of torch draws random numbers; fused attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    return "dropout_p" not in names or arguments.get("dropout_p", 0.0) != 0.0


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
