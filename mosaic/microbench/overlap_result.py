"""What ``overlap`` finds: step times by way of sharing, and where a gain comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from mosaic.device import FORBID_EXTRA
from mosaic.microbench.result import Result, Spread

Passes = Literal["forward", "forward+backward"]
Launching = Literal["eager", "captured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantTime:
    """One way of sharing, one kind of step."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    variant: str
    """Which way, with its quotas."""
    kind: str
    """``sequential``, ``plain``, ``prioritised``, ``partitions``, ``torch_contexts`` or ``mps``."""
    quotas: tuple[int, int] | None
    """Slots of each module; None where nothing confines them."""
    passes: Passes
    """What a step is."""
    launching: Launching
    """Operator by operator, or as one CUDA graph."""
    step_ms: Spread
    """From the step's beginning to the end of both modules."""
    note: str = ""
    """What to know about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Where a speed-up comes from; ratios of median times, each None where one of the two is missing."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    passes: Passes
    """What a step is."""
    launching: Launching
    """How it is launched."""
    total: float | None
    """One after the other, over the best partitions."""
    concurrency: float | None
    """One after the other, over plain streams."""
    quotas: float | None
    """Plain streams, over the best partitions; below 1 the quotas cost more than they bring."""
    best_partitions: str
    """The split that was best of those tried; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult(Result):
    """Step times by way of sharing."""

    modules: tuple[str, str]
    """Names of the two modules."""
    times: tuple[VariantTime, ...]
    """Everything measured."""
    gains: tuple[Gain, ...]
    """One for each kind of step."""


def gain_of(times: Sequence[VariantTime], passes: Passes, launching: Launching) -> Gain | None:
    """Splits the gain of one kind of step into concurrency and quotas; None where nothing was measured."""
    chosen = [time for time in times if time.passes == passes and time.launching == launching]
    if not chosen:
        return None
    by_kind = {time.kind: time.step_ms.median for time in chosen if time.kind in ("sequential", "plain")}
    partitions = [time for time in chosen if time.kind == "partitions"]
    best = min(partitions, key=lambda time: time.step_ms.median, default=None)
    sequential, plain = by_kind.get("sequential"), by_kind.get("plain")
    best_ms = best.step_ms.median if best is not None else None
    return Gain(
        passes=passes,
        launching=launching,
        total=_ratio(sequential, best_ms),
        concurrency=_ratio(sequential, plain),
        quotas=_ratio(plain, best_ms),
        best_partitions=best.variant if best is not None else "",
    )


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
