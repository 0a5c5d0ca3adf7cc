"""The SMs that kernels really run on, read by ``%smid`` from the kernels themselves."""

from __future__ import annotations

import pytest
import torch

from mosaic.backends.cuda import driver as cuda
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.cuda.pool import PartitionRecord

pytestmark = pytest.mark.gpu


def records(backend: CudaBackend, partitions: list[tuple[int, ...]]) -> tuple[PartitionRecord, ...]:
    with backend.open_lanes(partitions) as lanes:
        return lanes.partitions


def all_sms() -> tuple[int, ...]:
    """Ids need not be contiguous (PTX ISA, %smid), so the whole device is asked for them."""
    return cuda.CudaDriver(0).probe_stream(0)


def test_the_default_stream_and_plain_ones_use_the_whole_device():
    plain = torch.cuda.Stream()
    assert len(all_sms()) == cuda.describe_devices()[0].num_sms
    assert cuda.CudaDriver(0).probe_stream(plain.cuda_stream) == all_sms()


def test_each_partition_uses_as_many_sms_as_it_was_granted(cuda_backend: CudaBackend):
    slots = cuda_backend.device.slots
    for record in records(cuda_backend, [slots[:1], slots[1:], slots[: len(slots) // 2], slots]):
        assert record.sm_ids is not None
        assert len(record.sm_ids) == record.granted_sms


def test_single_slots_together_are_the_device_without_its_remainder(cuda_backend: CudaBackend):
    device = cuda_backend.device
    found = records(cuda_backend, [(slot,) for slot in device.slots])
    seen = [sm for record in found for sm in record.sm_ids or ()]
    assert len(seen) == len(set(seen)) == device.num_slots * device.sms_per_slot
    assert set(seen) <= set(all_sms())


def test_a_partition_has_the_sms_of_its_slots_in_whatever_layout(cuda_backend: CudaBackend):
    slots = cuda_backend.device.slots
    one, two, both = records(cuda_backend, [slots[:1], slots[1:2], slots[:2]])
    assert set(both.sm_ids or ()) == set(one.sm_ids or ()) | set(two.sm_ids or ())


def test_a_probe_compiled_to_ptx_sees_the_same(cuda_backend: CudaBackend):
    """The image for devices newer than this NVRTC."""
    from mosaic.backends.cuda import probe as cuda_probe

    major, minor = cuda.describe_devices()[0].compute_capability.split(".")
    image = cuda_probe._compile(cuda_probe._nvrtc(), cuda.probe_source(), f"compute_{major}{minor}", "PTX")
    assert cuda.CudaDriver(0).probe_stream(0, image) == all_sms()
