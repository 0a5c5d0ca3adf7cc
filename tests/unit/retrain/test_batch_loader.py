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
from mosaic.retrain.worker.loader import BatchCut, BatchLoader, RejectCount, StepBatch

BAD = {"old": {row: ValueError("torn") for row in range(0, 90, 9)}}
LENIENT = 0.5


def loader(cut: BatchCut, steps: range, workers: int = 0) -> BatchLoader:
    rejects = RejectCount(LENIENT)
    return BatchLoader(samples(3, BAD), cut, steps, workers=workers, rejects=rejects)


def contents(batches: Iterable[StepBatch], first: int = 0) -> dict[int, list[tuple[int, list[float]]]]:
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
            found |= contents([next(batches) for _ in range(3)], first)
    assert found == WHOLE


def test_unreadable_rows_come_back_with_the_batch_and_are_counted():
    batches = loader(BatchCut(batch=12, micro_batches=2), range(8), workers=2)
    rejects = [reject for batch in batches for reject in batch.rejects]
    assert rejects
    assert batches.rejects.by_source == {"old": {"ValueError": len(rejects)}}
    assert batches.rejects.samples == 96


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
