"""Other processes that use the CPU, made up where their load is read."""

from __future__ import annotations

import itertools

import pytest

from mosaic.profiler import CpuTime, ForeignLoad


def others_use(monkeypatch: pytest.MonkeyPatch, *shares: float | None) -> None:
    """Says of each measurement in turn, and of all after the last, that others took this share of the CPU."""
    following = itertools.chain(shares, itertools.repeat(shares[-1]))

    def taken(load: ForeignLoad) -> CpuTime | None:
        share = next(following)
        return None if share is None else CpuTime(share, 1.0, 1.0)

    monkeypatch.setattr(ForeignLoad, "taken", property(taken))
