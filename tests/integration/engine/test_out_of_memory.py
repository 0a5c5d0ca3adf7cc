"""A module for which there is no memory beside the others: run again with the lanes at rest, or said where."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import (
    SIDE_BY_SIDE,
    Outside,
    Record,
    TwoTowers,
    assert_trains_like_plain,
    colocated,
    pair_batch,
    run_both,
    tower,
)
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.engine.calls.thread_state import on_lane

WORDS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)


def torch_error() -> Exception:
    return RuntimeError(f"{WORDS} 400000000000 bytes. Error code 12 (Cannot allocate memory)")


class Hungry(nn.Module):
    """Finds no memory in its next ``failures`` calls on a lane, in the middle of its work."""

    failures = Outside(0)

    def __init__(self, *extra: nn.Module, error: Callable[[], Exception] = torch_error) -> None:
        super().__init__()
        self.first = tower()
        self.extra = nn.Sequential(*extra)
        self.last = nn.Linear(16, 16)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.extra(self.first(x))
        if on_lane() and self.failures:
            self.failures -= 1
            raise self.error()
        return self.last(hidden)


@pytest.mark.parametrize("error", [torch_error, MemoryError])
def test_a_forward_without_memory_on_its_lane_is_run_again_and_the_loop_stays_the_plain_loop(error: Any):
    def loop(model: Any, record: Record) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            model.left.failures = step % 2
            x, y = pair_batch(step)
            loss = model(x.requires_grad_(), y).square().mean()
            loss.backward()
            optimizer.step()
            record.note(loss, x.grad)
            record.note_model(model, optimizer)
            optimizer.zero_grad()
            model.left.failures = 0

    described = run_both(lambda: TwoTowers(Hungry(nn.Dropout(0.5), error=error)), pair_batch(), SIDE_BY_SIDE, loop)
    assert "3 calls of left ran out of memory on its lane" in described
    assert "engine_cases.py" in described.split("ran out of memory")[1]


def test_two_modules_that_run_out_of_memory_at_once_are_run_again_one_at_a_time():
    model = TwoTowers(Hungry(), Hungry())
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as handle:
        model(*pair_batch()).sum().backward()
        model.zero_grad()
        with handle.disabled():
            expected = model(*pair_batch()).detach()
        model.left.failures = model.right.failures = 1
        assert torch.equal(model(*pair_batch()), expected)
        assert "call of left ran out of memory" in handle.describe()
        assert "call of right ran out of memory" in handle.describe()
        assert_trains_like_plain(model, handle)


@pytest.mark.parametrize(
    ("extra", "failures", "said"),
    [
        ((), 2, "this was its second try, with the other lanes at rest"),
        ((nn.BatchNorm1d(16),), 1, "'left' was not run again: it had written into its buffers"),
    ],
    ids=["no memory again", "had written into its buffers"],
)
def test_a_module_that_cannot_be_run_again_is_named_with_its_place_and_lanes_go_on(
    extra: Any, failures: int, said: str
):
    model = TwoTowers(Hungry(*extra))
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as handle:
        model(*pair_batch())
        model.left.failures = failures
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            model(*pair_batch())
        notes = "\n".join(caught.value.__notes__)
        assert "raised in module 'left', called at" in notes
        assert said in notes
        assert all(norm.num_batches_tracked == 2 for norm in model.left.extra)
        assert_trains_like_plain(model, handle)


def test_another_runtime_error_is_not_tried_again():
    model = TwoTowers(Hungry(error=lambda: RuntimeError("shapes do not match")))
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as handle:
        model(*pair_batch())
        model.left.failures = 1
        with pytest.raises(RuntimeError, match="shapes do not match"):
            model(*pair_batch())
        assert "out of memory" not in handle.describe()


def test_work_that_goes_on_alone_waits_for_others_and_holds_back_what_comes_after():
    order: list[str] = []
    begun, may_end, asked = threading.Event(), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        may_end.wait(60)
        order.append("long ends")

    with HostBackend(num_slots=2).open_lanes([(0,), (1,)]) as lanes:
        first, second = lanes.lane((0,)), lanes.lane((1,))

        def pausing() -> None:
            asked.set()
            with first.alone():
                order.append("alone")

        def later() -> None:
            order.append("later")

        other = second.submit(long)
        assert begun.wait(60)
        paused = first.submit(pausing)
        after = second.submit(later)
        assert asked.wait(60)
        assert not paused.done
        may_end.set()
        for ticket in (other, paused, after):
            ticket.wait()
        lanes.drain()
    assert order == ["long ends", "alone", "later"]
