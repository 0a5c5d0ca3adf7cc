"""Rows of a day that training does not see: the same ones at each start, and whole clusters."""

from __future__ import annotations

import numpy as np

from mosaic.retrain.worker.sources import held_out_rows


class Recordings(list[int]):
    """Ten rows of each recording."""

    def cluster(self, index: int) -> str:
        return f"recording {index // 10}"


def out(rows: list[int], *, seed: int = 3, day: str = "2026-11-22", share: float = 0.1) -> np.ndarray:
    return held_out_rows(rows, share=share, seed=seed, day=day)


def test_the_same_rows_are_held_out_at_each_start_and_others_under_another_seed_or_day():
    rows = list(range(10_000))
    assert (out(rows) == out(rows)).all()
    assert 0.08 < out(rows).mean() < 0.12
    for other in (out(rows, seed=4), out(rows, day="2026-11-23")):
        assert (other != out(rows)).any()


def test_clusters_are_held_out_whole():
    found = out(Recordings(range(1000))).reshape(100, 10)
    assert 0 < found.any(1).sum() < 100
    assert (found.all(1) == found.any(1)).all()
