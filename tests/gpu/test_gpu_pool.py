"""The stream pool on a real driver: what is asked for is granted, and what is made can be ended."""

from __future__ import annotations

import pytest
import torch

from mosaic.backends.cuda import driver as cuda

pytestmark = pytest.mark.gpu


def driver_version() -> tuple[int, ...]:
    return tuple(int(part) for part in cuda.describe_driver().version.split("."))


def sizes(num_slots: int) -> list[tuple[int, ...]]:
    """Layouts by their quotas."""
    return [
        (num_slots // 2, num_slots - num_slots // 2),
        (1, num_slots - 1),
        (3 * num_slots // 8, num_slots // 8, num_slots // 2),
        (1,) * num_slots,
        (num_slots,),
    ]


def layout_of(quotas: tuple[int, ...]) -> list[tuple[int, ...]]:
    starts = [sum(quotas[:index]) for index in range(len(quotas))]
    return [tuple(range(start, start + quota)) for start, quota in zip(starts, quotas, strict=True)]


def test_the_driver_has_every_call_that_its_version_brings():
    version = driver_version()
    assert version >= (12, 5)
    for missing in cuda.describe_driver().missing:
        since = tuple(int(part) for part in missing.since.split("."))
        assert since > version, f"CUDA {version} should have {missing.name}"


def test_slots_and_remainder_add_up_to_the_device():
    (device, *_) = cuda.describe_devices()
    slots = cuda.CudaDriver(0).describe_slots()
    assert slots.num_slots * slots.sms_per_slot + slots.remainder_sms == device.num_sms
    if device.compute_capability == "9.0":
        assert slots.sms_per_slot == 8


def test_torch_and_the_driver_mean_the_same_device():
    (device, *_) = cuda.describe_devices()
    properties = torch.cuda.get_device_properties(0)
    assert properties.multi_processor_count == device.num_sms
    assert f"{properties.major}.{properties.minor}" == device.compute_capability


def test_every_partition_is_granted_what_it_asks_for():
    num_slots = cuda.CudaDriver(0).describe_slots().num_slots
    pool = cuda.CudaDriver(0).open_pool()
    try:
        for index, quotas in enumerate(sizes(num_slots)):
            pool.add_layout(layout_of(quotas))
            found = pool.partitions(index)
            assert [info.granted_sms for info in found] == [info.requested_sms for info in found]
    finally:
        pool.close()


def test_pools_are_made_and_ended_again_and_again():
    num_slots = cuda.CudaDriver(0).describe_slots().num_slots
    for _ in range(4):
        pool = cuda.CudaDriver(0).open_pool([layout_of(sizes(num_slots)[0])])
        stream = torch.cuda.ExternalStream(pool.lend(0, 0), device=torch.device("cuda", 0))
        with torch.cuda.stream(stream):
            total = torch.ones(1000, device="cuda").sum()
        stream.synchronize()
        assert total.item() == 1000
        del total, stream
        torch.cuda.empty_cache()
        pool.close()
        assert pool.closed
        assert pool.stats().num_contexts == 0
