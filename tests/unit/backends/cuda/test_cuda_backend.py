"""``CudaBackend`` on a fake runtime and a fake driver inside of this process; torch and driver mean one device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_streams import FakeGreenDriver, FakeStreams

from mosaic.backends.cuda.backend import CudaBackend, check_torch
from mosaic.backends.cuda.driver import CudaDevice
from mosaic.backends.host import HostBackend
from mosaic.errors import BackendUnavailableError


def test_a_lane_tells_the_sms_that_it_was_granted_and_not_those_that_were_asked_for(runtime: FakeStreams):
    class Stingy(FakeGreenDriver):
        def partition(self, slots: Any) -> Any:
            made = super().partition(slots)
            made.granted_sms -= 2
            return made

    with CudaBackend(api=runtime, driver=Stingy()).open_lanes([(0, 1), (2,)]) as lanes:
        assert [lane.num_sms for lane in lanes] == [14, 6]


def test_the_lane_of_all_slots_has_the_sms_that_the_split_leaves_over(driver: FakeGreenDriver, runtime: FakeStreams):
    backend = CudaBackend(api=runtime, driver=driver)
    with backend.open_lanes([backend.device.slots, (0,)]) as lanes:
        assert [(lane.slots, lane.num_sms) for lane in lanes] == [((0,), 8), (backend.device.slots, 36)]
        assert driver.num_lent == 1, "it is a plain stream"


def test_an_sm_target_is_refused_on_the_host():
    with pytest.raises(BackendUnavailableError, match=r"the host backend has no sm_target"):
        HostBackend(num_slots=2).with_sm_target()


def test_what_defeats_partitions_is_noted_and_logged_once(
    driver: FakeGreenDriver,
    runtime: FakeStreams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    driver.no_nvrtc = True
    backend = CudaBackend(api=runtime, driver=driver)
    for _ in range(2):
        backend.open_lanes([(0,), (1,)]).close()
    for words in ("CUDA_DEVICE_MAX_CONNECTIONS=1 for 2 lanes", "partitions were not probed"):
        assert len([note for note in backend.notes if words in note]) == caplog.text.count(words) == 1


def test_sm_ids_are_read_on_the_stream_that_is_current(driver: FakeGreenDriver, runtime: FakeStreams):
    backend = CudaBackend(api=runtime, driver=driver)
    with backend.open_lanes([(0,), (2,)]) as lanes:
        assert lanes.lane((2,)).submit(backend.read_units).wait() == tuple(range(16, 24))
    assert backend.read_units() == tuple(range(36))


def test_an_interrupt_while_a_layout_is_made_does_not_shift_the_layouts_after_it(
    driver: FakeGreenDriver, runtime: FakeStreams, monkeypatch: pytest.MonkeyPatch
):
    backend = CudaBackend(api=runtime, driver=driver)
    backend.open_lanes([(0,)]).close()
    add_layout = driver.pools[0].add_layout

    def interrupted(layout: Any) -> Any:
        add_layout(layout)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver.pools[0], "add_layout", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.open_lanes([(1,)])
    monkeypatch.setattr(driver.pools[0], "add_layout", add_layout)
    with backend.open_lanes([(2, 3)]) as lanes:
        assert [(record.slots, record.sm_ids) for record in lanes.partitions] == [((2, 3), tuple(range(16, 32)))]
        assert lanes.lane((2, 3)).num_sms == 16


def test_lanes_may_be_let_go_in_the_middle_of_borrowing(
    driver: FakeGreenDriver, runtime: FakeStreams, monkeypatch: pytest.MonkeyPatch
):
    """As the garbage collector may do, on the same thread."""
    backend = CudaBackend(api=runtime, driver=driver)
    old = [backend.open_lanes([(0,)])]
    lend = driver.pools[0].lend

    def lend_and_let_go(*arguments: Any, **options: Any) -> int:
        while old:
            old.pop()
        return lend(*arguments, **options)

    monkeypatch.setattr(driver.pools[0], "lend", lend_and_let_go)
    with backend.open_lanes([(0,), (1,)]):
        assert old == []
        assert driver.num_lent == 2
    assert driver.num_lent == 0


@pytest.mark.parametrize(
    ("uuids", "message"),
    [
        (None, "torch cannot use the GPU"),
        (("1",), "torch does not see device 1"),
        (("1", "3"), "differs between torch and the driver.*found: GPU-3 in torch; needed: GPU-2"),
        (("1", "GPU-2"), ""),
        (("1", None), ""),
    ],
)
def test_torch_must_have_the_drivers_device_under_its_number(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str | None, ...] | None, message: str
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: uuids is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids or ()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(uuid=(uuids or ())[at]))
    device = CudaDevice(
        ordinal=1, name="GPU", uuid="GPU-2", compute_capability="9.0", num_sms=132, total_memory_bytes=1
    )
    with pytest.raises(BackendUnavailableError, match=message) if message else nullcontext():
        check_torch(device)
