"""Samples by position are the same on any ranks, micro-batches and workers; unreadable rows are replaced."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_data import ROWS, Rows, samples, stream

import mosaic.ranks.world.world  # noqa: F401  # as in all ranks
from mosaic.errors import MosaicError
from mosaic.retrain.worker.data import held_out_rows
from mosaic.retrain.worker.loader import (
    MAX_ATTEMPTS,
    MIN_JUDGED,
    BatchCut,
    BatchLoader,
    Reject,
    RejectCount,
    Samples,
    StepBatch,
)

FIRST = 200
BAD = {"old": {row: ValueError("torn") for row in range(0, 90, 9)}}
UNREADABLE = {"new": {row: ValueError(f"no image in {row}.png") for row in range(0, 70, 3)}}
Contents = dict[int, list[tuple[int, list[float]]]]


def loader(cut: BatchCut, steps: range, workers: int = 0) -> BatchLoader:
    return BatchLoader(samples(3, BAD), cut, steps, workers=workers, rejects=RejectCount(0.5))


def contents(batches: Iterable[StepBatch], first: int = 0) -> Contents:
    """Returns rows and noise of each step, counted from ``first``, over its micro-batches."""
    return {
        step: [
            (row, noise)
            for part in batch.micro_batches
            for row, noise in zip(part.data[0].tolist(), part.data[1].tolist(), strict=True)
        ]
        for step, batch in enumerate(batches, first)
    }


WHOLE = contents(loader(BatchCut(batch=12), range(8)))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 6), (3, 1), (2, 6)])
def test_ranks_and_micro_batches_share_the_same_global_batches(ranks: int, micro_batches: int):
    drawn: Contents = {step: [] for step in range(8)}
    for rank in range(ranks):
        cut = BatchCut(batch=12, rank=rank, num_ranks=ranks, micro_batches=micro_batches)
        for step, rows in contents(loader(cut, range(8))).items():
            drawn[step] += rows
    assert drawn == WHOLE


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_after_any_step_gives_the_steps_that_were_left(workers: int):
    drawn: Contents = {}
    for first in (0, 2, 5):  # each loader has read ahead when it is left
        with loader(BatchCut(batch=12), range(first, 8), workers) as batches:
            drawn |= contents([next(batches) for _ in range(3)], first)
    assert drawn == WHOLE


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_takes_no_random_numbers_leaves_signals_alone_and_counts_rejects(workers: int):
    def states() -> str:
        return str((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))

    before = states(), signal.getsignal(signal.SIGCHLD)
    with loader(BatchCut(batch=12, micro_batches=2), range(8), workers) as batches:
        rejects = [reject for batch in batches for reject in batch.rejects]
        assert (states(), signal.getsignal(signal.SIGCHLD)) == before
    assert rejects
    assert batches.rejects.by_source == {"old": {"ValueError": len(rejects)}}
    assert batches.rejects.samples == 96


CUTS = st.builds(
    lambda ranks, micro_batches, more: (ranks, micro_batches, -(-micro_batches // ranks) * ranks + more),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 30),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=CUTS, step=st.integers(0, 9))
def test_a_cut_has_every_position_once_in_parts_as_equal_as_can_be(drawn: tuple[int, int, int], step: int):
    ranks, micro_batches, batch = drawn
    cuts = [BatchCut(batch=batch, rank=rank, num_ranks=ranks, micro_batches=micro_batches) for rank in range(ranks)]
    parts = [cut.positions(step, index) for cut in cuts for index in cut.own]
    assert [position for part in parts for position in part] == list(range(step * batch, (step + 1) * batch))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len({len(cut.own) for cut in cuts}) == 1
    assert micro_batches <= len(parts) < micro_batches + ranks


def test_workers_have_a_group_of_their_own_end_with_the_loader_and_a_killed_one_is_an_error():
    with loader(BatchCut(batch=12, micro_batches=2), range(1000), workers=2) as batches:
        next(batches)
        assert [os.getpgid(pid) for pid in batches.worker_pids] == list(batches.worker_pids)
        os.kill(batches.worker_pids[0], signal.SIGKILL)
        with pytest.raises(MosaicError, match=rf"process {batches.worker_pids[0]}: SIGKILL.*last checkpoint"):
            list(batches)
    for pid in batches.worker_pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_does_not_free_what_a_rank_left_in_a_cycle():
    class Communicator:
        def __init__(self) -> None:
            self.cycle, self.pid = self, os.getpid()

        def __del__(self) -> None:  # torch's hangs in a forked process
            _ = os.getpid() == self.pid or os._exit(1)

    Communicator()
    more = {"collate": lambda drawn: gc.collect(), "rejects": RejectCount()}
    with BatchLoader(samples(3), BatchCut(batch=12), range(2), workers=1, **more) as batches:
        assert len(list(batches)) == 2


def test_a_row_is_augmented_otherwise_when_it_comes_again():
    drawn, _ = samples().__getitems__(range(1000))
    assert [row for row, _ in drawn] == (1000 * stream().source + stream().row)[:1000].tolist()
    assert len({row for row, _ in drawn}) == sum(ROWS.values())
    values = torch.stack([noise for _, noise in drawn])
    assert len(values.unique()) == values.numel()


def test_unreadable_rows_give_way_to_others_of_their_source_and_are_named():
    (drawn, rejects), (plain, _) = (samples(bad=bad).__getitems__(range(FIRST)) for bad in (UNREADABLE, None))
    rejected = {reject.position for reject in rejects}
    assert rejected
    for position, ((row, _), (expected, _)) in enumerate(zip(drawn, plain, strict=True)):
        assert (row != expected) == (position in rejected)
        assert row // 1000 == expected // 1000
    first = rejects[0]
    assert (first.reason, first.detail) == ("ValueError", f"no image in {first.row}.png")
    assert plain[first.position][0] == first.row
    parts = [samples(bad=UNREADABLE).__getitems__(range(half, half + 100)) for half in (0, 100)]
    assert [row for part, _ in parts for row, _ in part] == [row for row, _ in drawn]
    assert parts[0][1] + parts[1][1] == rejects
    bad = {"older": {row: ValueError("torn") for row in range(ROWS["older"])}}
    with pytest.raises(MosaicError, match=rf"in {MAX_ATTEMPTS + 1} attempts.* row \d+ of 'older': ValueError: torn"):
        samples(bad=bad).__getitems__(range(FIRST))


def test_a_row_that_a_disk_gives_at_the_second_time_is_not_unreadable():
    class Flaky(Rows):
        def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
            sample = super().__getitem__(row)
            if self.asked % 2:
                raise OSError("input/output error")
            return sample

    flaky, rejects = Samples([Flaky(name) for name in ROWS], stream()).__getitems__(range(20))
    assert rejects == ()
    for (_, noise), (_, expected) in zip(flaky, samples().__getitems__(range(20))[0], strict=True):
        assert torch.equal(noise, expected)


def test_more_rejects_than_the_limit_name_a_row_and_its_reason():
    reject = Reject(position=3, source="new", row=17, reason="ValueError", detail="no image in 17.png")
    count = RejectCount(limit=0.01)
    count.add([reject] * (MIN_JUDGED // 100), 64)
    with pytest.raises(MosaicError, match=r"11 of 128 .*row 17 of 'new': ValueError: no image in 17\.png"):
        count.add([reject], 64)


class Recordings(list[int]):
    """Ten rows of each recording."""

    def cluster(self, index: int) -> str:
        return f"recording {index // 10}"


def test_the_same_rows_are_held_out_at_each_start_and_clusters_whole():
    def out(rows: list[int], *, seed: int = 3, day: str = "2026-11-22") -> np.ndarray:
        return held_out_rows(rows, share=0.1, seed=seed, day=day)

    rows = list(range(10_000))
    assert (out(rows) == out(rows)).all()
    assert 0.08 < out(rows).mean() < 0.12
    for other in (out(rows, seed=4), out(rows, day="2026-11-23")):
        assert (other != out(rows)).any()
    recordings = out(Recordings(range(1000))).reshape(100, 10)
    assert 0 < recordings.any(1).sum() < 100
    assert (recordings.all(1) == recordings.any(1)).all()
