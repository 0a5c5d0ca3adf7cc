"""Latencies on one rank of a cluster."""

from __future__ import annotations

import dataclasses

import pytest

from mosaic.hardware import find_cluster
from mosaic.pipelining.rank_hardware import Collective, Degrees, RankHardware


def machine(**degrees: int) -> RankHardware:
    return RankHardware(cluster=find_cluster("h800", 64), degrees=Degrees(**degrees))


def test_a_gather_takes_half_of_the_clusters_all_reduce() -> None:
    whole = find_cluster("h800", 64).all_reduce_ms(2**26, 4)
    gather = Collective(name="gather", num_bytes=2**26, axis="tensor")
    assert machine(tensor=4).collective_ns(gather) == round(whole * 1e6 / 2)
    assert machine(tensor=4).collective_ns(dataclasses.replace(gather, is_reduce=True)) == round(whole * 1e6)


def test_gradients_are_summed_over_data_and_context_ranks() -> None:
    sums = Collective(name="gradients", num_bytes=2**26, axis="data", is_reduce=True)
    assert machine(data=2, context=4).collective_ns(sums) == machine(data=8).collective_ns(sums)
    assert machine(context=8).collective_ns(sums) == machine(data=8).collective_ns(sums) > 0


def test_a_share_of_the_sms_and_bad_degrees_are_checked() -> None:
    assert dataclasses.replace(machine(), share=0.5).num_sms == 66
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            dataclasses.replace(machine(), share=share)
    with pytest.raises(ValueError, match="tensor=0"):
        Degrees(tensor=0)
    with pytest.raises(ValueError, match="need 128 devices; the cluster has 64"):
        machine(tensor=8, pipeline=16)
