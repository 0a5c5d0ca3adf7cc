"""The plain loop's random numbers in a step whose chunks run in another order, each on its rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mosaic.parts.modes import Modes
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.random_state import State, is_same_state, random_state, set_random_state
from mosaic.parts.ways_seen import kind_of
from mosaic.pipelining.schedule.action import TaskName

MAX_SEED = 2**62
MAX_KINDS = 1024
"""Of microbatches of which it is known whether they draw any."""


class DrawnNumbers:
    """Which kinds of microbatches of a model draw random numbers, as far as was seen; kept from step to step."""

    def __init__(self, model: PartedModel) -> None:
        self._model, self._modes = model, Modes(model.model)
        self._modes_before: Hashable = ()
        self._draws: dict[Hashable, bool] = {}

    def before_each(self, microbatches: Sequence[Mapping[str, Any]]) -> tuple[State, ...]:
        """Returns the generators' states before each microbatch of the plain loop, and leaves them as it would."""
        states = []
        modes = self._modes.now()
        if modes != self._modes_before or len(self._draws) > MAX_KINDS:
            self._modes_before = modes
            self._draws.clear()
            self._model.forget_results()
        for kwargs in microbatches:
            before = random_state(self._model.device)
            states.append(before)
            key = kind_of(kwargs)
            if self._draws.get(key, True):
                self._model.skip_random_numbers(kwargs)
                self._draws[key] = not is_same_state(before, random_state(self._model.device))
        return tuple(states)

    def draw(self, kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a microbatch draws any."""
        return self._draws.get(kind_of(kwargs), True)

    @contextmanager
    def numbers_of(self, task: TaskName, state: State, *, is_piece: bool) -> Iterator[None]:
        """Gives a forward the numbers of its microbatch; a piece of an encoder draws numbers of its own."""
        after = random_state(self._model.device)
        set_random_state(state)
        try:
            if is_piece:  # the plain loop draws for all at once
                seed = int(torch.randint(MAX_SEED, ()))
                torch.manual_seed(seed + 1_000_003 * task.chunk + task.piece)
            yield
        finally:
            set_random_state(after)
