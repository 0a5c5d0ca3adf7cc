"""All-reduces and messages over GPUs in nodes: what decides their time, and published measurements beside it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic.hardware import find_cluster

POD = find_cluster("h100-80g", 32)
A100_2, A100_3 = (find_cluster("a100-80g", gpus) for gpus in (16, 24))

PUBLISHED = {
    "8 H100, github.com/aws/aws-k8s-tester/pull/503": (find_cluster("h100-80g", 8), ((8, 12.9),)),
    "8 H100, github.com/NVIDIA/nccl-tests/issues/290": (
        find_cluster("h100-80g", 8),
        ((2**27, 613.3), (2**29, 2175.8), (2**32, 15870.0)),
    ),
    "2 nodes of 8 H100, github.com/drmysore/nebius-h100-16gpu-benchmark": (
        find_cluster("h100-80g", 16),
        ((2**20, 88.0), (10 * 2**20, 162.0), (100 * 2**20, 639.0), (1000 * 2**20, 4510.0)),
    ),
    "2 nodes of 8 A100 (Azure NDm A100 v4), jingchaozhang.github.io, post of 2023-09-11": (
        A100_2,
        ((8, 37.3), (2**18, 68.25), (2**20, 96.39), (2**22, 148.1), (2**25, 615.6), (2**28, 3013.5), (2**33, 85129.0)),
    ),
    "3 nodes of 8 A100 and 4 NICs, github.com/NVIDIA/nccl-tests/issues/119": (
        dataclasses.replace(A100_3, nics_per_node=4),
        ((127926280, 2560.7), (133169160, 2666.0)),
    ),
    # 320 GB/s of "bus bandwidth", 2 (d-1)/d of the bytes by the time
    "4 nodes of 8 H100, github.com/NVIDIA/nccl/issues/1221": (POD, ((2**33, 52009.0),)),
    "16 nodes of 8 H100, github.com/NVIDIA/nccl/issues/1469": (
        find_cluster("h100-80g", 128),
        ((8, 62.0), (4096, 76.6), (2**26, 888.0)),
    ),
}
"""Times of nccl-tests' all-reduce in microseconds, by bytes. No constant of the model was fitted to any of them; that
both kinds of link work at once was decided with the tables of two nodes in view, not with those of 3, 4 and 16."""


@pytest.mark.parametrize("of", PUBLISHED)
def test_predictions_are_within_a_factor_of_what_was_published(of: str):
    cluster, measured = PUBLISHED[of]
    for num_bytes, time_us in measured:
        ratio = 1e3 * cluster.all_reduce_ms(num_bytes, cluster.num_devices) / time_us
        # Latencies of NCCL's tables are below what small messages take; from 1 MiB on, a third either way.
        assert (0.7 if num_bytes >= 2**20 else 0.5) <= ratio <= 1.4, (of, num_bytes, ratio)


@given(st.integers(1, 32), st.integers(0, 10**10), st.integers(0, 10**9))
def test_more_bytes_never_take_less_time(degree: int, num_bytes: int, more: int):
    assert POD.all_reduce_ms(num_bytes + more, degree) >= POD.all_reduce_ms(num_bytes, degree)


@given(st.integers(0, 10**10), st.integers(1, 7))
def test_devices_of_one_node_and_whole_nodes_take_longer_the_more_they_are(num_bytes: int, less: int):
    degrees = (1, *range(8 - less, 9), 16, 24, 32)
    times = [POD.all_reduce_ms(num_bytes, degree) for degree in degrees]
    assert all(next_ms >= ms * (1 - 1e-12) for ms, next_ms in itertools.pairwise(times))


@given(st.integers(0, 10**10), st.integers(9, 32))
def test_a_last_node_that_is_not_full_never_saves_time(num_bytes: int, degree: int):
    whole = -(-degree // 8) * 8
    assert POD.all_reduce_ms(num_bytes, degree) >= POD.all_reduce_ms(num_bytes, whole) * (1 - 1e-12)
