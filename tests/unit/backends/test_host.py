"""The host alone has these: cores and thread counts."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from mosaic.backends.host.backend import SPINNING, HostBackend
from mosaic.hardware.find import available_cores


def test_each_lane_has_as_many_threads_as_slots():
    before = torch.get_num_threads()
    with HostBackend(num_slots=4).open_lanes([(0,), (1, 2), (0, 1, 2, 3)]) as lanes:
        counts = [lanes.lane(slots).submit(torch.get_num_threads).wait() for slots in ((0,), (1, 2), (0, 1, 2, 3))]
    assert counts == [1, 2, 4]
    assert torch.get_num_threads() == before


def test_lanes_may_have_another_number_of_threads_than_slots():
    with HostBackend(num_slots=4, num_threads=1).open_lanes([(0, 1, 2)]) as lanes:
        assert lanes.lane((0, 1, 2)).submit(torch.get_num_threads).wait() == lanes.lane((0, 1, 2)).num_threads == 1
    with pytest.raises(ValueError, match="num_threads=0"):
        HostBackend(num_threads=0)


def test_a_thread_of_the_user_does_not_take_over_a_lane_s_thread_count():
    before = torch.get_num_threads()
    found: list[int] = []
    with HostBackend(num_slots=4).open_lanes([(0,), (0, 1, 2, 3)]):
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert found == [before]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no thread affinity")
def test_a_lane_is_pinned_to_its_cores_and_the_caller_is_not():
    cores = available_cores()
    with HostBackend(num_slots=1).open_lanes([(0,)]) as lanes:
        assert lanes.lane((0,)).submit(lambda: os.sched_getaffinity(0)).wait() == {cores[0]}
    assert tuple(sorted(os.sched_getaffinity(0))) == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no thread affinity")
def test_more_slots_than_cores_run_unpinned_and_say_so():
    count = len(available_cores()) + 1
    backend = HostBackend(num_slots=count)
    assert any(f"num_slots={count} exceeds" in note for note in backend.notes)
    with backend.open_lanes([(0,)]) as lanes:
        assert tuple(sorted(lanes.lane((0,)).submit(lambda: os.sched_getaffinity(0)).wait())) == available_cores()


def test_spinning_threads_are_noted_by_each_backend_and_warned_of_at_most_once_a_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert SPINNING not in HostBackend(num_slots=2).notes
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    for _ in range(2):
        backend = HostBackend(num_slots=2)
        assert SPINNING in backend.notes
        backend.open_lanes([(0,), (1,)]).close()
    assert caplog.text.count(SPINNING) <= 1


def test_a_system_without_affinity_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    backend = HostBackend(num_slots=1)
    assert any("no thread affinity" in note for note in backend.notes)
    with backend.open_lanes([(0,)]) as lanes:
        assert lanes.lane((0,)).submit(lambda: 7).wait() == 7
