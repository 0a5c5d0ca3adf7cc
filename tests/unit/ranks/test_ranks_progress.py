"""The place of a rank, for the other ranks."""

from __future__ import annotations

import threading

from mosaic.ranks.world.progress import RankProgress


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
    assert progress.now.is_waiting
    with progress.computing("image", "backward"):
        assert "computing the backward of 'image'" in progress.now.text
    assert "waiting in the forward of 'text'" in progress.now.text
    done.set()
    thread.join()
    assert [wait[:3] for wait in progress.waits] == [("text", "forward", 0)]
