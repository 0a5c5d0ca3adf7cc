"""The steps of a routed call, as data: the engine runs them in this order, and a model checker goes through them.

What a step waits for is all that matters for whether ranks can block each other. ``tests/ranks/interleavings.py`` reads
these tables and tries every interleaving of small cases; ``tests/integration/ranks/test_ranks_engine.py`` holds what
really runs to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WaitsFor(StrEnum):
    """What a step cannot end without."""

    NOTHING = "nothing"
    EVERYONE = "the same step of the same call on all ranks"
    MEMBERS = "what the members have started"
    SLOTS = "the slots of the module on this rank, which nothing else holds then"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a call on one rank."""

    name: str
    """What it does; the forward's are the names of methods of ``ForwardPass``."""
    waits_for: WaitsFor
    """What it waits for."""
    starts_reduction: bool = False
    """Whether it starts, without waiting, what ``REDUCTION`` ends."""


AGREE = Step(name="agree", waits_for=WaitsFor.EVERYONE)
"""Each rank tells how many rows it has and whether it calls the module."""
SHARE = Step(name="share", waits_for=WaitsFor.EVERYONE)
"""Ranks that do not call it get the arguments that are no part of the batch; left out where all call it."""
TO_MEMBERS = Step(name="to_members", waits_for=WaitsFor.EVERYONE)
"""Rows go from the ranks that hold them to those that run the module; left out where none travel."""
COMPUTE = Step(name="compute", waits_for=WaitsFor.SLOTS)
"""The module's own work, on ranks that have rows for it."""
TO_HOLDERS = Step(name="to_holders", waits_for=WaitsFor.EVERYONE)
"""Rows go back; left out where none travel."""
START_REDUCTION = Step(name="start_reduction", waits_for=WaitsFor.NOTHING, starts_reduction=True)
"""Buckets that the backward has not started itself begin to be reduced; on members."""
END_REDUCTION = Step(name="end_reduction", waits_for=WaitsFor.MEMBERS)
"""The sums are awaited and handed out; on members."""

FORWARD = (AGREE, SHARE, TO_MEMBERS, COMPUTE, TO_HOLDERS)
"""A call."""
BACKWARD = (TO_MEMBERS, COMPUTE, START_REDUCTION, TO_HOLDERS)
"""Its backward: gradients of results to the members, those of arguments to the holders."""
REDUCTION = (END_REDUCTION,)
"""A piece of work of its own behind the backward, so that nothing but the backward's end waits for it."""
