"""``CudaBackend`` on a fake runtime and a fake driver inside of this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_streams import FakeGreenDriver, FakeStreams

from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.host import HostBackend
from mosaic.errors import BackendUnavailableError


def test_a_lane_tells_the_sms_that_it_was_granted_and_not_those_that_were_asked_for(runtime: FakeStreams):
    class Stingy(FakeGreenDriver):
        def partition(self, slots: Any, start: int | None) -> Any:
            made = super().partition(slots, start)
            made.granted_sms -= 2
            return made

    with CudaBackend(api=runtime, driver=Stingy()).open_lanes([(0, 1), (2,)]) as lanes:
        assert [lane.num_sms for lane in lanes] == [14, 6]


def test_a_backend_takes_sm_settings_besides_its_own(driver: FakeGreenDriver, runtime: FakeStreams):
    backend = CudaBackend(api=runtime, driver=driver)
    split = backend.with_sms(sm_placement="split")
    both = split.with_sms(fine_slots=True)
    assert [one.sm_settings for one in (backend, split, both)] == ["", "split by sizes", "fine slots, split by sizes"]
    assert backend.with_sms() is backend
    assert both.with_sms(fine_slots=True, sm_placement="split") is both
    for one in (backend, split, both):
        one.open_lanes([(0,)]).close()
    assert [pool.placement for pool in driver.pools] == ["merged", "split", "split"]


def test_sm_settings_are_refused_by_name_on_the_host():
    with pytest.raises(BackendUnavailableError, match=r"fine_slots and sm_target cannot be had on the host backend"):
        HostBackend(num_slots=2).with_sms(fine_slots=True, sm_target=True)


def test_a_machine_without_nvrtc_is_told_that_nothing_was_probed(
    driver: FakeGreenDriver, runtime: FakeStreams, caplog: pytest.LogCaptureFixture
):
    driver.no_nvrtc = True
    backend = CudaBackend(api=runtime, driver=driver)
    for _ in range(2):
        backend.open_lanes([(0,)]).close()
    assert len([note for note in backend.notes if "partitions were not probed" in note]) == 1
    assert caplog.text.count("partitions were not probed") == 1


@pytest.mark.parametrize("verify", [True, False])
def test_partitions_split_anew_take_turns_unless_they_were_seen_apart(runtime: FakeStreams, verify: bool):
    # (0,) is in one layout, (2, 3) in another, where it is placed behind (0, 1): apart, if somebody looks.
    backend = CudaBackend(api=runtime, driver=FakeGreenDriver(), placement="split", verify=verify)
    with backend.open_lanes([(0,), (1, 2, 3), (0, 1), (2, 3)]) as lanes:
        assert [record.sm_ids is not None for record in lanes.partitions] == [verify] * 4
        for lane in lanes:
            lane.launch(lambda: torch.ones(1), behind_caller=False)
        first, second, third, last = (runtime.on(lane.stream)[-1] for lane in lanes)
        assert first.is_concurrent_with(last) == verify
        assert first.is_concurrent_with(second)
        assert third.is_concurrent_with(last)
        assert last.is_after(second)


def test_what_defeats_partitions_is_noted_and_logged_once(
    driver: FakeGreenDriver,
    runtime: FakeStreams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    backend = CudaBackend(api=runtime, driver=driver)
    for _ in range(2):
        backend.open_lanes([(0,), (1,)]).close()
    notes = [note for note in backend.notes if "CUDA_DEVICE_MAX_CONNECTIONS=1 for 2 lanes" in note]
    assert len(notes) == 1
    assert caplog.text.count("CUDA_DEVICE_MAX_CONNECTIONS=1") == 1


def test_sm_ids_are_read_on_the_stream_that_is_current(driver: FakeGreenDriver, runtime: FakeStreams):
    backend = CudaBackend(api=runtime, driver=driver)
    with backend.open_lanes([(0,), (2,)]) as lanes:
        assert lanes.lane((2,)).submit(backend.read_units).wait() == tuple(range(16, 24))
    assert backend.read_units() == tuple(range(36))
