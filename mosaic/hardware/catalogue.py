"""The one table of devices known by name, each with the source of its figures.

Peaks are the vendor's dense figures (half of those "with sparsity"), bandwidths its memory figures, memory its
nominal size. Not the vendor's but ours, and what calibration is for: ``launch_us``, ``sm_gb_per_s`` (twice an SM's even
share, so that half of the SMs draw all of the bandwidth) and the efficiencies.

Slots are the driver's: 8 SMs on compute capability 9.0, and 4 on 8.x, the least partition up to CUDA 13.0 (CUDA driver
API, "cuDevSmResourceSplitByCount"); a newer driver also splits into pairs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mosaic.hardware.description import Efficiency, Hardware
from mosaic.hardware.link import Link

_GB = 10**9
_CUBLAS_BYTES = 2 * 32 * 2**20
"""cuBLAS keeps 32 MiB for each stream and thread on sm_90 (torch, CublasHandlePool.cpp); forward and backward have one
thread each. Older devices keep 8 MiB."""


def _even_share(bandwidth: float, num_sms: int) -> float:
    return round(2 * bandwidth / num_sms, 1)


_H100 = Hardware(
    name="h100-80g",
    source="NVIDIA H100 Tensor Core GPU datasheet, SXM: 989 TF bf16 dense, 3.35 TB/s, 80 GB; 132 SMs",
    num_sms=132,
    sms_per_slot=8,
    bf16_tflops=989.4,
    tf32_tflops=494.7,
    fp32_tflops=66.9,
    fp64_tflops=66.9,
    memory_bytes=80 * _GB,
    memory_gb_per_s=3350.0,
    sm_gb_per_s=_even_share(3350.0, 132),
    launch_us=4.0,
    lane_bytes=_CUBLAS_BYTES,
)
_A100 = Hardware(
    name="a100-80g",
    source="NVIDIA A100 80GB datasheet, SXM: 312 TF bf16 dense, 2,039 GB/s, 80 GB; 108 SMs",
    num_sms=108,
    sms_per_slot=4,
    bf16_tflops=312.0,
    tf32_tflops=156.0,
    fp32_tflops=19.5,
    fp64_tflops=19.5,
    memory_bytes=80 * _GB,
    memory_gb_per_s=2039.0,
    sm_gb_per_s=_even_share(2039.0, 108),
    launch_us=4.0,
    lane_bytes=2 * 8 * 2**20,
)
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    source="NVIDIA H200 datasheet, SXM: arithmetic as H100, 4.8 TB/s, 141 GB; 132 SMs",
    memory_bytes=141 * _GB,
    memory_gb_per_s=4800.0,
    sm_gb_per_s=_even_share(4800.0, 132),
)
_H800 = dataclasses.replace(
    _H100,
    name="h800",
    source="as H100 SXM with NVLink at 400 GB/s and 1 TF of float64 (NVIDIA H800 datasheet)",
    fp64_tflops=1.0,
)
_A40 = Hardware(
    name="a40",
    source="NVIDIA A40 datasheet: 149.7 TF bf16 dense, 74.8 TF tf32 dense, 37.4 TF fp32, 696 GB/s, 48 GB; 84 SMs",
    num_sms=84,
    sms_per_slot=4,
    bf16_tflops=149.7,
    tf32_tflops=74.8,
    fp32_tflops=37.4,
    fp64_tflops=0.58,  # 1/64 of fp32 (GA102 whitepaper)
    memory_bytes=48 * _GB,
    memory_gb_per_s=696.0,
    sm_gb_per_s=_even_share(696.0, 84),
    launch_us=4.0,
    lane_bytes=2 * 8 * 2**20,
)


def describe_host() -> Hardware:
    """Returns this machine's cores and memory, with stated defaults for all speeds.

    A core is taken to do 32 float32 operations a cycle (two 256-bit fused multiply-adds) at 2.5 GHz, and memory to give
    20 GB/s of which one core draws 10; calibrate before believing a time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fp32 = 0.08 * cores
    return Hardware(
        name="host",
        kind="host",
        source="cores and memory of this machine; speeds are defaults (2.5 GHz, AVX2, 20 GB/s)",
        num_sms=cores,
        bf16_tflops=fp32,
        tf32_tflops=fp32,
        fp32_tflops=fp32,
        fp64_tflops=fp32 / 2,
        memory_bytes=_memory_bytes(),
        memory_gb_per_s=20.0,
        sm_gb_per_s=10.0,
        launch_us=5.0,
        efficiency=Efficiency(attention=0.3, conv=0.4),
    )


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return 8 * _GB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """A device with the nodes and links that are usual for it."""

    describe: Callable[[], Hardware]
    """Describes one."""
    per_node: int
    """Devices in a node."""
    nics: int
    """NICs in a node."""
    intra_node: Link
    """Of a device, to others of its node."""
    inter_node: Link
    """Of a NIC."""


# Latencies: NCCL 2.30.7, src/graph/tuning.cc, hwLat, the ring's over NVLink and PCI, the tree's over the network.
_NVLINK_900, _NVLINK_600, _NVLINK_400 = (
    Link(gb_per_s=speed, latency_us=3.4, ll128_us=1.9, ll_us=0.6) for speed in (450.0, 300.0, 200.0)
)
_PCIE_4 = Link(gb_per_s=32.0, latency_us=5.7, ll_us=1.0)  # no LL128: NCCL uses it over NVLink
_RDMA_400, _RDMA_200 = (Link(gb_per_s=speed, latency_us=14.0, ll128_us=8.5, ll_us=5.0) for speed in (50.0, 25.0))

DEVICES: Mapping[str, KnownDevice] = MappingProxyType(
    {
        # DGX A100: NVLink 600, 8 x HDR 200
        "a100-80g": KnownDevice(
            describe=lambda: _A100, per_node=8, nics=8, intra_node=_NVLINK_600, inter_node=_RDMA_200
        ),
        # Mosaic 5.1: NVLink 900, 8 x NDR 400
        "h100-80g": KnownDevice(
            describe=lambda: _H100, per_node=8, nics=8, intra_node=_NVLINK_900, inter_node=_RDMA_400
        ),
        "h200": KnownDevice(describe=lambda: _H200, per_node=8, nics=8, intra_node=_NVLINK_900, inter_node=_RDMA_400),
        # PipeWeaver: NVLink 200, 8 x RoCE 200
        "h800": KnownDevice(describe=lambda: _H800, per_node=8, nics=8, intra_node=_NVLINK_400, inter_node=_RDMA_200),
        # Cornstarch: PCIe 4, one 200 Gb/s a node
        "a40": KnownDevice(
            describe=lambda: _A40,
            per_node=4,
            nics=1,
            intra_node=_PCIE_4,
            inter_node=_RDMA_200,
        ),
        # gloo over 10 Gb/s; latency assumed
        "host": KnownDevice(
            describe=describe_host,
            per_node=1,
            nics=1,
            intra_node=Link(gb_per_s=10.0),
            inter_node=Link(gb_per_s=1.25, latency_us=50.0),
        ),
    }
)
"""Every device known by name; a new one is a description above and an entry here."""

HARDWARE_NAMES = tuple(DEVICES)
"""All names."""
