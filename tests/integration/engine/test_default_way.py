"""The default way, with nothing scripted: find, profile, solve, try, and train colocated because that is faster."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from one_thread_work import MAX_STEPS, OPTIONS, Chains, chains_batch, once_more, train_chains

import mosaic
from mosaic.engine import Handle


def assert_side_by_side(handle: Handle, steps: int) -> None:
    """Holds that a solved plan has won the trial and that all calls since then ran on lanes, beside each other."""
    metrics, described = handle.metrics(), handle.describe()
    assert handle.profile is not None
    assert handle.active, described
    assert not handle.is_trying, described
    first, second = (set(placed.slots) for placed in handle.plan.placements)
    assert first.isdisjoint(second), described
    assert metrics["trial_steps"] > 0
    assert metrics["overlap"] > 0, described
    assert metrics["calls_in_place"] == 0, described
    calls = Counter(span.module for span in handle.timeline().spans if span.phase == "forward")
    assert calls == {"left": steps, "right": steps}


@once_more
def test_two_towers_of_one_thread_s_work_end_side_by_side_and_compute_what_the_plain_loop_does():
    torch.manual_seed(0)
    model = Chains()
    plain = copy.deepcopy(model)
    handle = mosaic.colocate(model, sample=chains_batch(0), options=OPTIONS)
    try:
        losses: list[float] = []
        while handle.is_trying and len(losses) < MAX_STEPS:
            losses += train_chains(model, range(len(losses), len(losses) + 1))
        handle.clear_timeline()
        losses += train_chains(model, range(len(losses), len(losses) + 5))
        assert_side_by_side(handle, 5)
    finally:
        handle.remove()
    assert losses == train_chains(plain, range(len(losses)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))
