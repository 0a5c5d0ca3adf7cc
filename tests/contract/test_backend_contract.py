"""What every backend promises in ``mosaic/backends/base.py``; a new backend adds itself to ``BACKENDS``."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mosaic.backends.base import Backend, Lanes
from mosaic.backends.host import HostBackend
from mosaic.errors import InvalidPlanError, MosaicError

BACKENDS: dict[str, Callable[[], Backend]] = {"host": lambda: HostBackend(num_slots=4)}
WAIT_S = 60


class StopEverything(BaseException):
    """Stands for KeyboardInterrupt: not an Exception."""


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


def gate(event: threading.Event) -> Callable[[], bool]:
    return lambda: event.wait(WAIT_S)


def test_a_backend_names_itself_and_its_device(backend: Backend):
    assert backend.name == backend.device.kind
    assert backend.device.num_slots == 4
    assert all(isinstance(note, str) for note in backend.notes)


def test_a_lane_gives_the_result_of_its_work(backend: Backend):
    with backend.open_lanes([(0,)]) as lanes:
        ticket = lanes.lane((0,)).submit(lambda: torch.ones(2) + 1)
        assert torch.equal(ticket.wait(), torch.full((2,), 2.0))
        assert ticket.done


def test_a_lane_keeps_the_order_of_its_work(backend: Backend):
    seen: list[int] = []
    with backend.open_lanes([(0, 1)]) as lanes:
        tickets = [lanes.lane((0, 1)).submit(lambda number=number: seen.append(number)) for number in range(50)]
        tickets[-1].wait()
    assert seen == list(range(50))


def test_work_starts_after_what_it_was_told_to_wait_for(backend: Backend):
    seen: list[str] = []
    opened = threading.Event()
    with backend.open_lanes([(0,), (1,)]) as lanes:
        first = lanes.lane((0,)).submit(lambda: (opened.wait(WAIT_S), seen.append("first")))
        second = lanes.lane((1,)).submit(lambda: seen.append("second"), after=[first])
        assert not second.done
        opened.set()
        second.wait()
    assert seen == ["first", "second"]
    assert first.interval_ns[1] <= second.interval_ns[0]


def test_failed_work_does_not_keep_what_waits_for_it_from_starting(backend: Backend):
    with backend.open_lanes([(0,), (1,)]) as lanes:
        failed = lanes.lane((0,)).submit(lambda: 1 / 0)
        after = lanes.lane((1,)).submit(lambda: "went on", after=[failed])
        assert after.wait() == "went on"


def test_disjoint_lanes_run_at_the_same_time(backend: Backend):
    meeting = threading.Barrier(2)
    with backend.open_lanes([(0,), (1,)]) as lanes:
        tickets = [lanes.lane((slot,)).submit(lambda: meeting.wait(WAIT_S)) for slot in (0, 1)]
        assert sorted(ticket.wait() for ticket in tickets) == [0, 1]
        (one, two) = (ticket.interval_ns for ticket in tickets)
    assert max(one[0], two[0]) < min(one[1], two[1])


def test_a_slot_is_never_held_twice(backend: Backend):
    partitions = [(0,), (1,), (0, 1), (1, 2), (2, 3), (0, 1, 2, 3)]
    with backend.open_lanes(partitions) as lanes:
        tickets = []
        for round_ in range(20):
            for index in range(len(partitions)):
                slots = partitions[(index * 5 + round_) % len(partitions)]
                tickets.append((slots, lanes.lane(slots).submit(lambda: torch.ones(64).sum())))
        for _, ticket in tickets:
            ticket.wait()
        intervals = [(slots, ticket.interval_ns) for slots, ticket in tickets]
    for slot in range(4):
        held = sorted(interval for slots, interval in intervals if slot in slots)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(held))


def test_overlapping_partitions_that_wait_for_each_other_never_lock_up(backend: Backend):
    partitions = [(0,), (1,), (0, 1), (1, 2), (0, 1, 2, 3)]
    with backend.open_lanes(partitions) as lanes:
        previous: list[Any] = []
        for number in range(200):
            lane = lanes.lane(partitions[(number * 7) % len(partitions)])
            previous = [*previous[-3:], lane.submit(lambda: None, after=previous[-3:])]
        assert previous[-1].wait() is None


def test_work_whose_inputs_are_missing_does_not_hold_its_slots(backend: Backend):
    opened = threading.Event()
    with backend.open_lanes([(0,), (1,), (0, 1)]) as lanes:
        blocker = lanes.lane((1,)).submit(gate(opened))
        waiting = lanes.lane((0, 1)).submit(lambda: "wide", after=[blocker])
        later = lanes.lane((0,)).submit(lambda: "narrow")
        assert later.wait() == "narrow"
        assert not waiting.done
        opened.set()
        assert waiting.wait() == "wide"


@pytest.mark.parametrize("kind", [ValueError, StopEverything, KeyboardInterrupt])
def test_an_error_is_raised_at_each_wait_and_the_lane_goes_on(backend: Backend, kind: type[BaseException]):
    def fail() -> None:
        raise kind("no")

    with backend.open_lanes([(0,)]) as lanes:
        ticket = lanes.lane((0,)).submit(fail)
        for _ in range(2):
            with pytest.raises(kind, match="no"):
                ticket.wait()
        assert ticket.done
        assert lanes.lane((0,)).submit(lambda: 3).wait() == 3


def test_draining_waits_for_everything_and_raises_nothing(backend: Backend):
    with backend.open_lanes([(0,), (1,)]) as lanes:
        tickets = [lanes.lane((slot,)).submit(lambda: 1 / 0) for slot in (0, 1, 0, 1)]
        lanes.drain()
        assert all(ticket.done for ticket in tickets)


def test_closing_finishes_what_was_submitted_and_refuses_more(backend: Backend):
    lanes = backend.open_lanes([(0,)])
    lane = lanes.lane((0,))
    tickets = [lane.submit(lambda number=number: number) for number in range(10)]
    lanes.close()
    assert [ticket.wait() for ticket in tickets] == list(range(10))
    with pytest.raises(MosaicError, match="closed"):
        lane.submit(lambda: None)
    lanes.close()


def test_lanes_are_closed_when_nobody_refers_to_them(backend: Backend):
    before = threading.active_count()
    lanes = backend.open_lanes([(0,), (1,)])
    lanes.lane((0,)).submit(lambda: None).wait()
    del lanes
    assert threading.active_count() == before


def test_a_partition_is_opened_once_and_only_if_it_was_asked_for(backend: Backend):
    with backend.open_lanes([(0, 1), (1, 0), (0, 1)]) as lanes:
        assert lanes.lane((0, 1)) is lanes.lane((0, 1))
        assert lanes.lane((0, 1)).slots == (0, 1)
        with pytest.raises(KeyError):
            lanes.lane((3,))


@pytest.mark.parametrize("slots", [(), (4,), (-1,), (0, 0)])
def test_a_partition_that_the_device_does_not_have_is_refused(backend: Backend, slots: tuple[int, ...]):
    with pytest.raises(InvalidPlanError, match="slot"):
        backend.open_lanes([slots])


def test_results_are_let_go_with_their_ticket(backend: Backend):
    import gc
    import weakref

    with backend.open_lanes([(0,)]) as lanes:
        ticket = lanes.lane((0,)).submit(lambda: torch.ones(3))
        alive = weakref.ref(ticket.wait())
        del ticket
        lanes.drain()
        gc.collect()
        assert alive() is None


def test_the_protocols_are_met(backend: Backend):
    with backend.open_lanes([(0,)]) as lanes:
        assert isinstance(lanes, Lanes)
