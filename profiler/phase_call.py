"""One phase of a module as a call that can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mosaic.profile import Phase
from mosaic.profiler.measuring.together import Call
from mosaic.profiler.subject import Subject


def prepare_phase(subject: Subject, phase: Phase) -> Call | None:
    """Returns one repetition of a phase, the other phase's work done once; None for a module without that phase.

    To be called on the lane on which it will be repeated.
    """
    if phase is Phase.FORWARD:
        return _forward(subject)
    outputs = subject.forward()
    return partial(subject.backward, outputs, keep=True) if outputs else None


def _forward(subject: Subject) -> Callable[[], None]:
    def call() -> None:
        subject.forward()  # its result, and with it the graph, goes at once

    return call
