"""Where a rank is, as other ranks are told."""

from __future__ import annotations

import threading

import pytest

from mosaic.ranks.world.progress import THE_LOOP, RankProgress


def test_a_rank_that_has_done_nothing_is_before_its_first_step():
    progress = RankProgress()
    assert str(progress.now) == "before its first step"
    with progress.waiting(THE_LOOP, "agreement"):
        assert str(progress.now) == "before its first step, waiting for all ranks to agree"


def test_a_rank_is_where_its_last_block_was():
    progress = RankProgress()
    progress.step, progress.calls = 3, 4
    with progress.computing("image", "forward"):
        assert str(progress.now) == "step 3, computing the forward of 'image'"
    assert str(progress.now) == "step 3, in the loop's own code after the forward of 'image'"
    with progress.waiting(THE_LOOP, "reduce"):
        assert str(progress.now) == "step 3, waiting in the reduction of gradients of the model"


def test_a_rank_that_computes_is_not_waiting_whatever_its_other_threads_do():
    progress = RankProgress()
    entered, done = threading.Event(), threading.Event()

    def wait() -> None:
        with progress.waiting("text", "forward"):
            entered.set()
            done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait()
    assert progress.now.doing == "waiting"
    with progress.computing("image", "backward"):
        assert progress.now.module == "image"
    assert progress.now.module == "text"
    done.set()
    thread.join()
    assert [(wait.module, wait.step) for wait in progress.waits] == [("text", 0)]


def test_an_error_that_ends_a_wait_is_explained():
    progress = RankProgress()
    progress.explain = lambda error: LookupError(f"rank 1 was at fault: {error}")
    with pytest.raises(LookupError, match="at fault: connection closed"), progress.waiting("text", "forward"):
        raise RuntimeError("connection closed")


def test_an_error_that_has_no_explanation_stays_as_it_is():
    with pytest.raises(RuntimeError, match="shapes"), RankProgress().waiting("text", "forward"):
        raise RuntimeError("shapes differ")
