"""The likely course of a module's time over the quota before it is measured: a mean, and the ways to differ from it.

Made from counted operators and a device's description (``mosaic.cost.surfaces.shape_prior``), kept in a profile beside
the samples, and conditioned on these (``mosaic.cost.surfaces.posterior``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mosaic.artifact import Ge
from mosaic.device import FORBID_EXTRA
from mosaic.errors import InvalidProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCurve:
    """One phase at one degree, over the quotas of its ``ModuleShape``."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    phase: Literal["forward", "backward"]
    """Forward or backward; a ``Phase``."""
    degree: Annotated[int, Ge(1)]
    """Data-parallel degree."""
    log_ms: tuple[float, ...]
    """Mean of the logarithm of the time in milliseconds, at each quota."""
    modes: tuple[tuple[float, ...], ...]
    """Independent ways to differ from it, each by one standard deviation; a module's curves share their amounts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape:
    """All phases and degrees of a module.

    Raises:
        InvalidProfileError: Quotas do not rise, or a curve has not one finite value for each of them.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    module: str
    """Name in the graph."""
    quotas: tuple[int, ...]
    """Slots, rising."""
    curves: tuple[ShapeCurve, ...]
    """One for each phase and degree that was counted."""
    source: str
    """Where it comes from: which description of the device."""

    def __post_init__(self) -> None:
        if not self.quotas or list(self.quotas) != sorted({quota for quota in self.quotas if quota > 0}):
            raise InvalidProfileError(f"shape of {self.module!r}: quotas {self.quotas}; use rising ones from 1 on")
        if len({len(curve.modes) for curve in self.curves}) > 1:
            raise InvalidProfileError(f"shape of {self.module!r}: its curves have different numbers of modes")
        for curve in self.curves:
            for values in (curve.log_ms, *curve.modes):
                if len(values) != len(self.quotas) or not all(map(math.isfinite, values)):
                    raise InvalidProfileError(
                        f"shape of {self.module!r} ({curve.phase}, degree {curve.degree}): needs one finite value for "
                        f"each of {len(self.quotas)} quotas; profile this model again"
                    )
