"""Which rows of a day are kept from training: the same ones at each start, whole clusters, and at little cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mosaic.retrain.worker.sources import SourceRecord, Sources, held_out_rows, trained_rows

RECORD = SourceRecord(kind="new", day="2026-11-22", path="data/2026-11-22", files=(), digest="", rows=1000)
SOURCES = Sources(
    day="2026-11-22", seed=3, fresh_share=0.1, batch=8, num_steps=10, sources=(RECORD,), frozen=replace(RECORD, day="")
)


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


def test_what_is_trained_on_is_asked_for_rows_by_python_integers():
    class Rows(list[int]):
        def __getitem__(self, index):
            assert type(index) is int
            return super().__getitem__(index)

    rows = Rows(range(1000))
    part = trained_rows(RECORD, rows, SOURCES)
    assert [part[index] for index in range(len(part))] == np.flatnonzero(~out(rows)).tolist()
