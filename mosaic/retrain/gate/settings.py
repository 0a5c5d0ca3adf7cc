"""The ``[gate]`` table of a recipe: the loss that a challenger may have, and the confidence of the gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from mosaic.artifact import Ge, Le
from mosaic.device import FORBID_EXTRA


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """Rules of the gate. Margins and budgets are in units of the score, where larger is better."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    margin: float = 0.01
    """Loss against the champion that a challenger may have on the frozen rows; above 0."""
    confidence: float = 0.95
    """One-sided confidence that no more is lost; from 0.5 to below 1."""
    anchor_margins: Annotated[float, Ge(0)] = 2.0
    """Loss allowed against the anchor, in margins."""
    slice_margins: Annotated[float, Ge(0)] = 3.0
    """Loss allowed in a slice of the frozen rows, in margins."""
    fresh_margins: Annotated[float, Ge(0)] = 3.0
    """Loss allowed on the rows held out of the day's new data, in margins: they are few."""
    slices: tuple[str, ...] = ()
    """Columns of the score, such as ``site``, whose values cut the frozen rows into slices."""
    min_slice_rows: Annotated[int, Ge(1)] = 200
    """Slices and fresh rows with fewer rows are shown and do not count."""
    frozen_budget: Annotated[float, Ge(0)] = 0.0
    """Further loss on old frozen rows that a clear gain on fresh rows buys; 0 buys nothing."""
    recent_days: Annotated[int, Ge(0)] = 30
    """Days in which an added frozen row is recent: no gain buys a loss on recent rows."""
    min_value: float | None = None
    """Mean value on the frozen rows that every challenger must reach, the first one too; None for any."""
    max_size_bytes: Annotated[int, Ge(1)] | None = None
    """Size of the exported model; None for any."""
    max_latency_ms: Annotated[float, Ge(0)] | None = None
    """Time of the exported model for one row; None for any."""
    min_power: Annotated[float, Ge(0), Le(1)] = 0.8
    """Chance of passing that an equal model must have: a margin that the frozen rows cannot resolve is refused."""
    flip_rate: Annotated[float, Ge(0), Le(1)] = 0.02
    """Assumed share of rows on which two equal models differ by a whole value, until two versions were compared."""
    alarm_after: Annotated[int, Ge(1)] = 3
    """Consecutive refusals after which the report asks for a person."""
    max_looks: Annotated[int, Ge(1)] = 60
    """Decisions after which the report calls a frozen set worn."""
    renew_rows: Annotated[int, Ge(0)] = 0
    """Fresh rows of each promoted day that become frozen rows; 0 for none."""
    max_frozen_rows: Annotated[int, Ge(1)] = 20_000
    """Largest number of frozen rows; renewal drops others beyond it."""
    resamples: Annotated[int, Ge(1000)] = 2000
    """Resamples of the bootstrap."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the bootstrap: the same rows give the same verdict."""

    def __post_init__(self) -> None:
        """Checks the ranges that types cannot express.

        Raises:
            ValueError: The margin is not above 0, or the confidence is not from 0.5 to below 1.
        """
        if not 0 < self.margin < float("inf"):
            raise ValueError(f"margin = {self.margin} must be above 0: set the loss that you would not notice")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence = {self.confidence} must be from 0.5 to below 1, such as 0.95")
