"""Remembering which calls cannot be captured, and which are captured over and over without being of use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch

from mosaic.engine.stage_graph_call import TakenCall

_ATTEMPTS = 3
"""Captures of one kind of call, with none of them ever used twice, after which it is left alone."""

_UNUSED = 12
"""Captures of one set of branches in a row, such as with ever new shapes, that mean the same."""


class Refusals:
    """What is known of calls that were not, or should not be, captured.

    A stage's key is its name, the settings of torch, and the keys of its calls.
    """

    def __init__(self) -> None:
        self._reasons: dict[Hashable, str] = {}
        self._attempts: Counter[Hashable] = Counter()
        self._unused: Counter[Hashable] = Counter()

    def reason(self, call: TakenCall) -> str | None:
        """Returns why calls of this kind are left alone, or None."""
        return self._reasons.get(_kind(call))

    def refuse(self, call: TakenCall, reason: str, *, lasting: bool) -> bool:
        """Notes that a call could not be captured; returns whether its kind is left alone from now on.

        Args:
            call: The call.
            reason: Why.
            lasting: Whether another try would be in vain; otherwise a few are made.
        """
        kind = _kind(call)
        self._attempts[kind] += 1
        if lasting or self._attempts[kind] >= _ATTEMPTS:
            self._reasons[kind] = reason
        return kind in self._reasons

    def is_vain(self, key: Hashable) -> bool:
        """Counts a capture that is about to be made; returns whether it should not, since so many were of no use."""
        self._attempts[key] += 1
        return self._attempts[key] > _ATTEMPTS or self._unused[_names(key)] >= _UNUSED

    def captured(self, key: Hashable) -> None:
        """Notes a capture."""
        self._unused[_names(key)] += 1

    def used(self, key: Hashable) -> None:
        """Notes that a capture served a second call."""
        self._attempts.pop(key, None)
        self._unused.pop(_names(key), None)


def _kind(call: TakenCall) -> Hashable:
    return (call.key, torch.is_grad_enabled())


def _names(key: Any) -> Hashable:
    stage, _, calls = key
    return (stage, tuple(call[0] for call in calls))
