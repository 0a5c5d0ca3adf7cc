"""Latencies on one rank of a cluster."""

from __future__ import annotations

import dataclasses

import pytest

from mosaic.hardware import find_cluster
from mosaic.pipelining.rank_hardware import Collective, Degrees, Exchange, RankHardware


def machine(**degrees: int) -> RankHardware:
    return RankHardware(cluster=find_cluster("h800", 64), degrees=Degrees(**degrees))


def test_a_gather_takes_half_of_the_clusters_all_reduce() -> None:
    whole = find_cluster("h800", 64).all_reduce_ms(2**26, 4)
    gather = Collective(name="gather", num_bytes=2**26, axis="tensor")
    assert machine(tensor=4).collective_ns(gather) == round(whole * 1e6 / 2)
    assert machine(tensor=4).collective_ns(dataclasses.replace(gather, is_reduce=True)) == round(whole * 1e6)


def test_a_rank_without_peers_on_an_axis_sends_nothing() -> None:
    assert machine(tensor=4).collective_ns(Collective(name="keys", num_bytes=2**26, axis="context")) == 0


def test_messages_between_context_peers_take_the_time_of_the_busiest_and_are_from_each_of_them() -> None:
    at = machine(context=2)
    both, one = (Exchange(name="keys", sent_bytes=sent) for sent in (((0, 2**26), (2**26, 0)), ((0, 2**26), (0, 0))))
    assert at.time_ns(both) == at.time_ns(one) > 0  # links work both ways at once
    assert at.time_ns(Exchange(name="keys", sent_bytes=((0, 0), (0, 0)))) == 0
    with pytest.raises(ValueError, match="keys: 2 senders among 4 context ranks"):
        machine(context=4).time_ns(both)


def test_gradients_are_summed_over_data_and_context_ranks() -> None:
    sums = Collective(name="gradients", num_bytes=2**26, axis="data", is_reduce=True)
    assert machine(data=2, context=4).collective_ns(sums) == machine(data=8).collective_ns(sums)
    assert machine(context=8).collective_ns(sums) == machine(data=8).collective_ns(sums) > 0


def test_context_peers_in_other_nodes_are_slower_than_in_the_same_node() -> None:
    gather = Collective(name="keys", num_bytes=2**26, axis="context")
    assert machine(tensor=4, context=2).collective_ns(gather) < machine(tensor=8, context=2).collective_ns(gather)


def test_with_one_nic_a_node_tensor_peers_share_it() -> None:
    many = machine(tensor=8, data=8)
    few = dataclasses.replace(many, cluster=dataclasses.replace(many.cluster, nics_per_node=1))
    reduce = Collective(name="gradients", num_bytes=2**28, axis="data", is_reduce=True)
    assert few.collective_ns(reduce) == pytest.approx(8 * many.collective_ns(reduce), rel=0.02)


def test_a_share_of_the_sms_and_bad_degrees_are_checked() -> None:
    assert dataclasses.replace(machine(), share=0.5).num_sms == 66
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            dataclasses.replace(machine(), share=share)
    with pytest.raises(ValueError, match="tensor=0"):
        Degrees(tensor=0)
    with pytest.raises(ValueError, match="need 128 devices; the cluster has 64"):
        machine(tensor=8, pipeline=16)
