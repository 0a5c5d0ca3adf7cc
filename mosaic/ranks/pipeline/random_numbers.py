"""The plain loop's random numbers in a step whose chunks run in another order, each on its rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from mosaic.find.random_numbers import RandomState, forked, random_state
from mosaic.parts.parted_model import PartedModel

MAX_KINDS = 1024
"""Most known kinds of microbatches."""


class Modes:
    """The attributes of a model's modules that are switches or rates, such as ``training`` and rates of dropout.

    Also those of objects among the attributes, such as a configuration.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        objects = {id(each): each for module in modules for each in vars(module).values() if hasattr(each, "__dict__")}
        others = [each for each in objects.values() if not isinstance(each, nn.Module | Tensor | type)]
        self._places = [
            (vars(owner), name, isinstance(owner, _DropoutNd))
            for owner in (*modules, *others)
            for name, value in vars(owner).items()
            if type(value) in (bool, float, int)
        ]

    def now(self) -> tuple[Any, ...]:
        """Returns their values; whole numbers, except rates of dropout, may be the loop's counters and are None."""
        values = [(attributes.get(name), is_rate) for attributes, name, is_rate in self._places]
        return tuple([None if type(value) is int and not is_rate else value for value, is_rate in values])

    def switches(self) -> Hashable:
        """Returns those of their properties that may choose a path: of rates whether they are 0."""
        return tuple(map(bool, self.now()))


class DrawnNumbers:
    """The kinds of microbatches of a model that draw random numbers; known from step to step, and from plan to plan."""

    def __init__(self, model: PartedModel) -> None:
        self._model, self._modes = model, Modes(model.model)
        self._followers: WeakSet[PartedModel] = WeakSet([model])
        self._modes_before: Hashable = ()
        self._first = self._modes.switches()
        self._switches: Hashable = None  # as in the sample's run
        self._draws: dict[Hashable, bool] = {}

    def add_follower(self, model: PartedModel) -> None:
        """Has another object over the same model forget results of modules when modes change."""
        self._followers.add(model)
        model.forget_results(self._switches)

    def before_each(
        self, microbatches: Sequence[Mapping[str, Any]], draws: Sequence[bool]
    ) -> tuple[RandomState | None, ...]:
        """Returns the generators' states before microbatches that draw, and advances them as the plain loop does."""
        states: list[RandomState | None] = []
        for kwargs, draws_any in zip(microbatches, draws, strict=True):
            states.append(random_state(self._model.device) if draws_any else None)
            if draws_any:
                self._model.skip_random_numbers(kwargs)
        return tuple(states)

    def draw(self, kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a microbatch draws any, with the present modes and rates of the model."""
        modes = self._modes.now()
        if modes != self._modes_before or len(self._draws) > MAX_KINDS:
            self._modes_before = modes
            self._draws.clear()
            switches = self._modes.switches()
            self._switches = None if switches == self._first else switches
            for model in self._followers:
                model.forget_results(self._switches)
        key = self._model.kind_of(kwargs)
        if key not in self._draws:
            with forked(self._model.device):
                before = random_state(self._model.device)
                self._model.skip_random_numbers(kwargs)
                self._draws[key] = not before.is_same(random_state(self._model.device))
            if self._draws[key]:
                self._model.check_calls(kwargs)
        return self._draws[key]
