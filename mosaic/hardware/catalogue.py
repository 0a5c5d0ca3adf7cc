"""The one table of devices known by name, each with the source of its figures.

Peaks are the vendor's dense figures (half of those "with sparsity"), bandwidths its memory figures, memory its
nominal size. Not the vendor's, and what calibration is for:

* ``launch_us``: 5, since an eager PyTorch launch takes 4 to 6 us of one core ("From Launch Overhead to CUDA Graph",
  susun-blog.com/blog/pegainfer-3-cuda-graph: 4 to 6 us for the driver's part alone; 5 to 25 us with Python, dispatcher
  and autograd at jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html). Backward is launched from
  C++, with less around it.
* ``kernel_us`` and ``graph_kernel_us``: 2.1 and 1.3 us between dependent kernels of an H100, on a stream and in a graph
  (Hazy Research, "Look Ma, No Bubbles!", hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles); taken for the others.
* ``graph_launch_us``: a graph's launch takes about 1 ns a node from Ampere on (NVIDIA, "Constant Time Launch for
  Straight-Line CUDA Graphs", developer.nvidia.com/blog/constant-time-launch-for-straight-line-cuda-graphs-and-other-
  performance-enhancements); the 2.5 us of a graph itself are left out.
* ``matmul`` and ``ramp_k`` of Hopper: products of 8192 x 8192 x k in float16 on an H800 (tilelang, benchmark/matmul/
  README.md): 386, 520, 628, 705, 736, 758, 766 TF at k = 256, 512, ..., 16384. 0.79 k / (k + 270) of 989 TF is within
  3 % of each. Others get the same time, and so a ``ramp_k`` in proportion to an SM's peak.
* ``attention``: PyTorch's is FlashAttention-2, with 35 % of an H100's peak (Shah et al. 2024, arXiv 2407.08608,
  abstract) and 50 to 73 % of an A100's (Dao 2023, arXiv 2307.08691, abstract).
* ``memory``: 0.8; norms and gates reach 2.6 and 2.8 of 3.35 TB/s on an H100 (pyptx, release 0.1.0).
* ``sm_gb_per_s``: ours, twice an SM's even share, so that half of the SMs draw all of the bandwidth.

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


_HOPPER = Efficiency(matmul=0.79, attention=0.35)
_AMPERE = Efficiency(attention=0.6)


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
    launch_us=5.0,
    kernel_us=2.1,
    ramp_k=270.0,
    graph_launch_us=0.001,
    graph_kernel_us=1.3,
    lane_bytes=_CUBLAS_BYTES,
    efficiency=_HOPPER,
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
    launch_us=5.0,
    kernel_us=2.1,
    ramp_k=104.0,
    graph_launch_us=0.001,
    graph_kernel_us=1.3,
    lane_bytes=2 * 8 * 2**20,
    efficiency=_AMPERE,
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
    launch_us=5.0,
    kernel_us=2.1,
    ramp_k=64.0,
    graph_launch_us=0.001,
    graph_kernel_us=1.3,
    lane_bytes=2 * 8 * 2**20,
    efficiency=_AMPERE,
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
