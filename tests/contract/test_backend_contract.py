"""The promises of ``mosaic/backends/base.py``, held by every backend of the table.

``fake-cuda`` is the product of the ``cuda`` backend on a fake runtime and a fake driver, so that its promises are held
on machines without a GPU; ``cuda`` is the same on a real one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from contract.gates import CudaGate, FakeStreamGate, Gate, ThreadGate
from fake_streams import FakeGreenDriver, FakeStreams

from mosaic.backends import table
from mosaic.backends.base import Backend, Lane, Ticket
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.host.backend import HostBackend
from mosaic.backends.table import BACKENDS, open_backend
from mosaic.errors import BackendUnavailableError, InvalidPlanError, MosaicError

WAIT_S = 60
MADE: dict[str, Callable[[], Backend]] = {
    **{name: partial(open_backend, name) for name in BACKENDS},
    "host": lambda: HostBackend(num_slots=4),  # whatever this machine has
    "fake-cuda": lambda: CudaBackend(api=FakeStreams(), driver=FakeGreenDriver(num_slots=4)),
}
NAMES = [pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else []) for name in MADE]


class StopEverything(BaseException):
    """Stands for KeyboardInterrupt: not an Exception."""


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = MADE[request.param]()
    if isinstance(made, CudaBackend) and isinstance(made.api, FakeStreams):
        with made.api.watching():
            yield made
    else:
        yield made


@pytest.fixture
def gate(backend: Backend) -> Iterator[Gate]:
    """Work that is held until it is opened; at the latest at the end of the test."""
    made: Gate = ThreadGate()
    if isinstance(backend, CudaBackend):
        fake = isinstance(backend.api, FakeStreams)
        made = FakeStreamGate(backend.api) if fake else CudaGate(backend)  # type: ignore[arg-type]
    yield made
    made.open()


def timed(lane: Lane, work: Callable[[], object] = lambda: None, **submit: Any) -> Ticket[tuple[Any, Any]]:
    """Submits work whose result is the marks at its start and at its end."""

    def run() -> tuple[Any, Any]:
        start = lane.mark()
        work()
        return start, lane.mark()

    return lane.submit(run, **submit)


def ends_before(first: Ticket[tuple[Any, Any]], second: Ticket[tuple[Any, Any]], *, end: bool = False) -> bool:
    """Returns True if the first work has ended before the second one began, or before its end."""
    return first.wait()[1].ms_until(second.wait()[1 if end else 0]) >= 0.0


def test_a_backend_names_itself_and_its_device(backend: Backend):
    assert backend.name in table.BACKENDS
    assert table.TORCH_TYPES[backend.torch_device.type] in table.BACKENDS
    assert backend.device.num_slots >= 4
    assert all(isinstance(note, str) for note in backend.notes)


def test_a_lane_keeps_the_order_of_its_work(backend: Backend):
    seen: list[int] = []
    with backend.open_lanes([(0, 1)]) as lanes:
        tickets = [lanes.lane((0, 1)).submit(lambda number=number: seen.append(number)) for number in range(50)]
        tickets[-1].wait()
    assert seen == list(range(50))


def test_work_starts_after_what_it_was_told_to_wait_for(backend: Backend, gate: Gate):
    with backend.open_lanes([(0,), (1,)]) as lanes:
        first = timed(lanes.lane((0,)), gate.hold)
        second = timed(lanes.lane((1,)), after=[first])
        assert not first.done
        assert not second.done
        gate.open()
        assert ends_before(first, second)


def test_failed_work_does_not_keep_what_waits_for_it_from_starting(backend: Backend):
    with backend.open_lanes([(0,), (1,)]) as lanes:
        failed = lanes.lane((0,)).submit(lambda: 1 / 0)
        after = lanes.lane((1,)).submit(lambda: "went on", after=[failed])
        assert after.wait() == "went on"


@pytest.mark.parametrize("held", [0, 1])
def test_disjoint_lanes_run_at_the_same_time(backend: Backend, gate: Gate, held: int):
    with backend.open_lanes([(0,), (1,)]) as lanes:
        long, inside = timed(lanes.lane((held,)), gate.hold), timed(lanes.lane((1 - held,)))
        start, end = inside.wait()
        assert start.ms_until(end) >= 0.0
        assert not long.done
        gate.open()
        assert ends_before(inside, long, end=True)


def test_lanes_with_a_slot_in_common_take_turns(backend: Backend, gate: Gate):
    with backend.open_lanes([(0, 1), (1, 2)]) as lanes:
        first, second = timed(lanes.lane((0, 1)), gate.hold), timed(lanes.lane((1, 2)))
        assert not second.done
        gate.open()
        assert ends_before(first, second)


def test_a_slot_is_never_held_twice(backend: Backend):
    partitions = [(0,), (1,), (0, 1), (1, 2), (2, 3), (0, 1, 2, 3)]
    with backend.open_lanes(partitions) as lanes:
        tickets = []
        for round_ in range(20):
            for index in range(len(partitions)):
                slots = partitions[(index * 5 + round_) % len(partitions)]
                work = partial(torch.ones, 64, device=backend.torch_device)
                tickets.append((slots, timed(lanes.lane(slots), work)))
        for slot in range(4):
            held = [ticket for slots, ticket in tickets if slot in slots]
            assert all(itertools.starmap(ends_before, itertools.pairwise(held)))


def test_overlapping_partitions_that_wait_for_each_other_never_lock_up(backend: Backend):
    partitions = [(0,), (1,), (0, 1), (1, 2), (0, 1, 2, 3)]
    with backend.open_lanes(partitions) as lanes:
        previous: list[Any] = []
        for number in range(200):
            lane = lanes.lane(partitions[(number * 7) % len(partitions)])
            previous = [*previous[-3:], lane.submit(lambda: None, after=previous[-3:])]
        assert previous[-1].wait() is None


def test_work_whose_inputs_are_missing_does_not_hold_its_slots():
    gate = ThreadGate()
    with MADE["host"]().open_lanes([(0,), (1,), (0, 1)]) as lanes:
        blocker = lanes.lane((1,)).submit(gate.hold)
        waiting = lanes.lane((0, 1)).submit(lambda: "wide", after=[blocker])
        later = lanes.lane((0,)).submit(lambda: "narrow")
        assert later.wait() == "narrow"
        assert not waiting.done
        gate.open()
        assert waiting.wait() == "wide"


@pytest.mark.parametrize("kind", [ValueError, StopEverything, KeyboardInterrupt])
def test_an_error_is_raised_at_each_wait_and_not_by_draining(backend: Backend, kind: type[BaseException]):
    def fail() -> None:
        raise kind("no")

    with backend.open_lanes([(0,), (1,)]) as lanes:
        tickets = [lanes.lane((slot,)).submit(fail) for slot in (0, 1, 0, 1)]
        lanes.drain()
        assert all(ticket.done for ticket in tickets)
        for ticket in (*tickets, *tickets):
            with pytest.raises(kind, match="no"):
                ticket.wait()
        assert lanes.lane((0,)).submit(lambda: 3).wait() == 3


def test_closing_finishes_what_was_submitted_and_refuses_more(backend: Backend):
    lanes = backend.open_lanes([(0,)])
    lane = lanes.lane((0,))
    tickets = [lane.submit(lambda number=number: number) for number in range(10)]
    lanes.close()
    assert all(ticket.done for ticket in tickets)
    assert [ticket.wait() for ticket in tickets] == list(range(10))
    with pytest.raises(MosaicError, match="closed"):
        lane.submit(lambda: None)
    lanes.close()


def test_lanes_are_closed_when_nobody_refers_to_them(backend: Backend):
    before = threading.active_count()
    lanes = backend.open_lanes([(0,), (1,)])
    lane = lanes.lane((0,))
    lane.submit(lambda: None).wait()
    del lanes
    assert threading.active_count() == before
    with pytest.raises(MosaicError, match="closed"):
        lane.submit(lambda: None)


def test_work_can_submit_to_other_lanes(backend: Backend):
    with backend.open_lanes([(0,), (1,)]) as lanes:
        outer = lanes.lane((0,)).submit(lambda: lanes.lane((1,)).submit(lambda: "inner"))
        assert outer.wait().wait() == "inner"


def test_threads_submit_at_once_and_each_gets_its_own_results(backend: Backend):
    found: dict[int, list[int]] = {}
    with backend.open_lanes([(0,), (1,), (0, 1)]) as lanes:

        def submit(number: int) -> None:
            lane = lanes.lane([(0,), (1,), (0, 1)][number % 3])
            tickets = [lane.submit(lambda value=value: 100 * number + value) for value in range(50)]
            found[number] = [ticket.wait() for ticket in tickets]

        threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        lanes.drain()
    assert found == {number: [100 * number + value for value in range(50)] for number in range(6)}


def test_a_mark_tells_the_time_between_two_points_of_a_lane(backend: Backend):
    with backend.open_lanes([(0,)]) as lanes:
        lane = lanes.lane((0,))
        first, second = lane.submit(lane.mark), lane.submit(lane.mark)
        assert first.wait().ms_until(second.wait()) >= 0.0


def test_the_same_partitions_can_be_opened_by_two_at_once(backend: Backend):
    with backend.open_lanes([(0,)]) as one, backend.open_lanes([(0,)]) as two:
        assert [lanes.lane((0,)).submit(lambda: 5).wait() for lanes in (one, two)] == [5, 5]
        one.close()
        assert two.lane((0,)).submit(lambda: 6).wait() == 6


def test_a_partition_is_opened_once_and_only_if_it_was_asked_for(backend: Backend):
    with backend.open_lanes([(0, 1), (1, 0), (0, 1)]) as lanes:
        assert lanes.lane((0, 1)) is lanes.lane((0, 1))
        assert lanes.lane((0, 1)).slots == (0, 1)
        with pytest.raises(KeyError):
            lanes.lane((3,))


@pytest.mark.parametrize("slots", [(), (10_000,), (-1,), (0, 0)])
def test_a_partition_that_the_device_does_not_have_is_refused(backend: Backend, slots: tuple[int, ...]):
    with pytest.raises(InvalidPlanError, match="slot"):
        backend.open_lanes([slots])


def test_results_are_let_go_with_their_ticket(backend: Backend):
    with backend.open_lanes([(0,)]) as lanes:
        ticket = lanes.lane((0,)).submit(lambda: torch.ones(3, device=backend.torch_device))
        alive = weakref.ref(ticket.wait())
        del ticket
        lanes.drain()
        gc.collect()
        assert alive() is None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_lanes_refuse_to_be_used_in_a_forked_child(backend: Backend):
    with backend.open_lanes([(0,)]) as lanes:
        assert lanes.lane((0,)).submit(lambda: 1).wait() == 1
        child = os.fork()
        if child == 0:  # no pytest in here: the child ends by itself, with the answer as its exit code
            try:
                lanes.lane((0,)).submit(lambda: 2)
            except MosaicError as error:
                lanes.close()
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lanes.lane((0,)).submit(lambda: 2).wait() == 2


def test_what_a_backend_cannot_do_it_says(backend: Backend):
    with backend.open_lanes([(0,)]) as lanes:
        assert (lanes.streams is None) == (backend.api is None)
        assert (lanes.lane((0,)).num_threads is None) == lanes.launches_inline
        assert lanes.lane((0,)).num_sms in (None, backend.device.sms_per_slot)
        for ability in (lambda: lanes.aside("waiting"), lambda: backend.open_plain_lanes([(0,)]).close()):
            with contextlib.suppress(BackendUnavailableError):
                ability()
