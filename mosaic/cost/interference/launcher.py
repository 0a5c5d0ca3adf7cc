"""One thread of the host that launches for all modules of a device, beside any form of interference."""

from __future__ import annotations

import math
from typing import Protocol

from mosaic.cost.interference.protocol import Interference, Neighbours
from mosaic.profile import Phase


class HasLaunchTime(Protocol):
    """Anything that knows how long one thread of the host takes to launch a module's kernels."""

    def launch_ms(self, module: str, phase: Phase) -> float:
        """Returns that time, in milliseconds."""


class OneLauncher:
    """Another form of interference, where one thread launches for all on a device: none ends before the last launch.

    Whichever takes longer counts, what the form says or the wait for the last launch, and the wait grows with all
    neighbours together: no sum over pairs.

    Attributes:
        form: The other form.
        launches: What launching each module takes.
    """

    is_zero = False
    is_pairwise = False

    def __init__(self, form: Interference, launches: HasLaunchTime) -> None:
        self.form = form
        self.launches = launches

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns what the form says, or what is missing until the last launch, in milliseconds."""
        if not beside:
            return 0.0
        extra_ms = self.form.extra_ms(module, phase, quota=quota, alone_ms=alone_ms, beside=beside)
        names = (module, *(name for name, _ in beside))
        launched_ms = math.fsum(self.launches.launch_ms(name, phase) for name in names)
        return max(extra_ms, launched_ms - alone_ms)


def without_launcher(form: Interference) -> Interference:
    """Returns what neighbours cost but for one thread's launches."""
    return form.form if isinstance(form, OneLauncher) else form


def relaunched(form: Interference, *, like: Interference) -> Interference:
    """Returns a form, with the one launcher of another one where that has it."""
    return OneLauncher(form, like.launches) if isinstance(like, OneLauncher) else form
