"""Which results of modules go into other modules as they are, and nowhere else: seen in the sample's step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from mosaic.engine.calls.structure import flatten, tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A tensor that one module returns and another takes, with no operation between and no other use."""

    source: str
    """The module that returns it."""
    result: int
    """Which leaf of its result."""
    target: str
    """The module that takes it."""
    argument: int
    """Which leaf of its arguments."""


class Handovers:
    """Watches the tensors that modules return. Whoever calls it keeps them alive, so that an id stays one tensor's."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[str, int]] = {}
        self._taken: dict[int, list[tuple[str, int]]] = {}
        self._given: dict[str, list[int]] = {}
        self._otherwise: set[int] = set()

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        leaves = flatten((args, kwargs))[0]
        self._given[name] = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for index, leaf in enumerate(leaves):
            if id(leaf) in self._made:
                self._taken.setdefault(id(leaf), []).append((name, index))

    def leave(self, name: str, result: Any) -> None:
        """A module has returned; a tensor that it was given, or that it returns twice, goes further than into it."""
        leaves = flatten(result)[0]
        ids = [id(leaf) for leaf in leaves]
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.nn.Parameter) or id(leaf) in self._given[name] or ids.count(id(leaf)) > 1:
                self._otherwise.add(id(leaf))
            elif isinstance(leaf, torch.Tensor):
                self._made[id(leaf)] = (name, index)

    def used(self, tensors: Collection[torch.Tensor], here: str | None) -> None:
        """An operation reads tensors: between modules (``here`` is None), or in a module that may be given them."""
        for tensor in tensors:
            if id(tensor) in self._made and (here is None or id(tensor) not in self._given.get(here, ())):
                self._otherwise.add(id(tensor))

    def found(self, end: object) -> tuple[Handover, ...]:
        """Returns what is handed over; what the step itself returned (``end``) has a use there."""
        otherwise = self._otherwise | {id(tensor) for tensor in tensors_in(end)}
        return tuple(
            Handover(source=source, result=result, target=self._taken[key][0][0], argument=self._taken[key][0][1])
            for key, (source, result) in self._made.items()
            if key not in otherwise and len(self._taken.get(key, ())) == 1
        )
