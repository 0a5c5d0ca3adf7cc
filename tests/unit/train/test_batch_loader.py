from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_data import samples

from mosaic.errors import MosaicError
from mosaic.ranks import RankSampler
from mosaic.retrain.worker.loader import BatchCut, BatchLoader, RejectCount, StepBatch

BAD = {"old": {row: ValueError("torn") for row in range(0, 90, 9)}}
LENIENT = 0.5


def loader(cut: BatchCut, steps: range, workers: int = 0) -> BatchLoader:
    rejects = RejectCount(LENIENT)
    return BatchLoader(samples(3, BAD), cut, steps, workers=workers, rejects=rejects)


def contents(batches: Iterable[StepBatch]) -> dict[int, list[tuple[int, list[float]]]]:
    """Returns rows and noise of each step, over its micro-batches."""
    return {
        batch.step: [
            (row, noise)
            for part in batch.micro_batches
            for row, noise in zip(part.data[0].tolist(), part.data[1].tolist(), strict=True)
        ]
        for batch in batches
    }


WHOLE = contents(loader(BatchCut(batch=12), range(8)))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 6), (3, 1), (2, 6)])
def test_ranks_and_micro_batches_share_the_same_global_batches(ranks: int, micro_batches: int):
    found: dict[int, list[tuple[int, list[float]]]] = {step: [] for step in range(8)}
    for rank in range(ranks):
        cut = BatchCut(batch=12, rank=rank, num_ranks=ranks, micro_batches=micro_batches)
        for step, rows in contents(loader(cut, range(8))).items():
            found[step] += rows
    assert found == WHOLE


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_after_any_step_gives_the_steps_that_were_left(workers: int):
    found: dict[int, list[tuple[int, list[float]]]] = {}
    for first in (0, 2, 5):  # each loader has read ahead when it is left
        with loader(BatchCut(batch=12), range(first, 8), workers) as batches:
            found |= contents([next(batches) for _ in range(3)])
    assert found == WHOLE


def test_unreadable_rows_come_back_with_the_batch_and_are_counted():
    batches = loader(BatchCut(batch=12, micro_batches=2), range(8), workers=2)
    rejects = [reject for batch in batches for reject in batch.rejects]
    assert {reject.position // 12 for reject in rejects} <= set(range(8))
    assert batches.rejects.by_source == {"old": {"ValueError": len(rejects)}}
    assert batches.rejects.samples == 96
    assert len(rejects) >= 1


def test_too_many_unreadable_rows_end_the_run():
    with pytest.raises(MosaicError, match=r"row \d+ of 'old': ValueError: torn"):
        list(BatchLoader(samples(3, BAD), BatchCut(batch=12), range(100), rejects=RejectCount(0)))


def test_errors_of_the_data_are_said_in_a_sentence():
    bad = {"old": {row: ValueError("torn") for row in range(90)}}
    with BatchLoader(samples(3, bad), BatchCut(batch=12), range(9), workers=1) as batches:
        with pytest.raises(
            MosaicError, match=r"^position \d+ read no row .*ValueError: torn\. Check that source"
        ) as found:
            list(batches)
        assert "\n" not in str(found.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_takes_no_random_numbers_and_leaves_signals_alone(workers: int):
    def states() -> str:
        return str((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))

    before = states(), signal.getsignal(signal.SIGCHLD)
    with loader(BatchCut(batch=12), range(4), workers) as batches:
        next(batches)
        assert (states(), signal.getsignal(signal.SIGCHLD)) == before


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


@pytest.mark.parametrize(("batch", "ranks"), [(12, 3), (11, 4), (7, 2)])
def test_ranks_cut_as_the_rank_sampler_does(batch: int, ranks: int):
    cuts = [BatchCut(batch=batch, rank=rank, num_ranks=ranks) for rank in range(ranks)]
    shares = tuple(cut.rows[rank] for rank, cut in enumerate(cuts))
    for rank, cut in enumerate(cuts):
        sampled = list(RankSampler(3 * batch, shares, rank, shuffle=False))
        assert sampled == [list(cut.positions(step, rank)) for step in range(3)]


def test_weights_of_micro_batches_add_up_to_one_over_all_ranks():
    parts = [next(loader(BatchCut(batch=11, rank=rank, num_ranks=2, micro_batches=4), range(1))) for rank in (0, 1)]
    assert sum(part.weight for batch in parts for part in batch.micro_batches) == pytest.approx(1)
    assert [part.index for batch in parts for part in batch.micro_batches] == [0, 1, 2, 3]
    assert [part.rows for batch in parts for part in batch.micro_batches] == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"batch": 8, "rank": 2, "num_ranks": 2}, "ranks count from 0"),
        ({"batch": 8, "micro_batches": 0}, "a micro-batch or more"),
        ({"batch": 3, "num_ranks": 2, "micro_batches": 4}, "a batch of 4 or more"),
    ],
)
def test_cuts_that_cannot_be_are_refused(fields: dict[str, int], rule: str):
    with pytest.raises(ValueError, match=rule):
        BatchCut(**fields)


def test_a_killed_worker_is_an_error_that_says_how_it_ended():
    with loader(BatchCut(batch=12), range(1000), workers=1) as batches:
        next(batches)
        os.kill(batches.worker_pids[0], signal.SIGKILL)
        with pytest.raises(MosaicError, match=rf"process {batches.worker_pids[0]}: SIGKILL.*last checkpoint"):
            list(batches)


def test_workers_have_a_group_of_their_own_and_end_with_the_loader():
    with loader(BatchCut(batch=12, micro_batches=2), range(1000), workers=2) as batches:
        next(batches)
        assert [os.getpgid(pid) for pid in batches.worker_pids] == list(batches.worker_pids)
    for pid in batches.worker_pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
