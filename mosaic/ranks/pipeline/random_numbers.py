"""The plain loop's random numbers in a step whose chunks run in another order, each on its rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mosaic.find.random_numbers import RandomState, forked, random_state
from mosaic.parts.modes import Modes
from mosaic.parts.parted_model import PartedModel, kind_of

MAX_KINDS = 1024
"""Of microbatches of which it is known whether they draw any."""


class DrawnNumbers:
    """Which kinds of microbatches of a model draw random numbers, as far as was seen; kept from step to step."""

    def __init__(self, model: PartedModel) -> None:
        self._model, self._modes = model, Modes(model.model)
        self._modes_before: Hashable = ()
        self._draws: dict[Hashable, bool] = {}

    def before_each(self, microbatches: Sequence[Mapping[str, Any]]) -> tuple[RandomState, ...]:
        """Returns the generators' states before each microbatch of the plain loop, and leaves them as it would."""
        states = []
        for kwargs in microbatches:
            states.append(random_state(self._model.device))
            if self.draw(kwargs):
                self._model.skip_random_numbers(kwargs)
        return tuple(states)

    def draw(self, kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a microbatch draws any, with the modes and rates that the model has now."""
        modes = self._modes.now()
        if modes != self._modes_before or len(self._draws) > MAX_KINDS:
            self._modes_before = modes
            self._draws.clear()
            self._model.forget_results()
        key = kind_of(kwargs)
        if key not in self._draws:
            with forked(self._model.device):
                before = random_state(self._model.device)
                self._model.skip_random_numbers(kwargs)
                self._draws[key] = not before.is_same(random_state(self._model.device))
        return self._draws[key]

    @contextmanager
    def numbers_of(self, state: RandomState) -> Iterator[None]:
        """Gives a forward the numbers of its microbatch, whose state before it is given."""
        after = random_state(self._model.device)
        state.restore()
        try:
            yield
        finally:
            after.restore()
