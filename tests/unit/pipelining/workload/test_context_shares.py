"""Sequences that context ranks share: work, bytes, memory, and times of layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.masks import DRAWN
from mosaic.context import plan_context
from mosaic.context.attention.room import fetched_bytes
from mosaic.hardware import find_cluster
from mosaic.pipelining.semu.graph import OperatorNode, Subgraph
from mosaic.pipelining.semu.rank_hardware import Degrees, Exchange, RankHardware
from mosaic.pipelining.semu.simulate import Simulator
from mosaic.pipelining.workload.attention_core import fetched_keys
from mosaic.pipelining.workload.formulas import StepWriter
from mosaic.pipelining.workload.intake import Intake
from mosaic.pipelining.workload.layer_graphs import LayerSteps, backward_graph, forward_graph
from mosaic.pipelining.workload.layer_steps import ModuleLoad
from mosaic.pipelining.workload.layers import Layer
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.pipelining.workload.sequence_share import ContextSharing, SequenceShare, share_sequences
from mosaic.pipelining.workload.shapes import TransformerShape
from mosaic.pipelining.workload.transformer import TransformerModule

CAUSAL = TransformerShape(layers=3, hidden=1024, ffn=4096, heads=16, groups=8, causal=True)


def module(
    shape: TransformerShape = CAUSAL, *, context: int = 1, unit: Any = "text", **sharing: Any
) -> TransformerModule:
    return TransformerModule(
        name="module",
        shape=shape,
        machine=RankHardware(cluster=find_cluster("h800", 8), degrees=Degrees(context=context)),
        intake=Intake(unit=unit, text=unit == "text", image_tokens=256),
        projects_to=0 if unit == "text" else 512,
        sharing=ContextSharing(**sharing),
    )


def layers(tokens: int, **options: Any) -> tuple[Layer, ...]:
    return module(**options).layers(Microbatch(text_tokens=tokens), 1)


def shared(tokens: int, ranks: int, *, sequences: int = 1, is_causal: bool = True, **sharing: Any) -> SequenceShare:
    return share_sequences(
        ContextSharing(**sharing), sequences=sequences, tokens=tokens, ranks=ranks, is_causal=is_causal
    )


def test_small_shares_are_those_worked_out_by_hand() -> None:
    tile = 128 * 128
    assert shared(512, 2) == SequenceShare(  # rows of 1, 2, 3 and 4 tiles: 1 + 4 and 2 + 3
        ranks=2, local_tokens=256, pairs=5 * tile, imbalance=1.0, fetched_tokens=512, received_tokens=256
    )
    ring = shared(512, 2, method="ring")
    assert (ring.pairs, ring.imbalance) == (7 * tile, 1.4)
    assert shared(500, 2, is_causal=False).pairs == 8 * tile
    assert shared(640, 2).local_tokens == 3 * 128  # five blocks: one place of each but the last is empty
    apart = shared(256, 2, sequences=2, exchange="needed")  # a packed sequence each
    assert (apart.pairs, apart.fetched_tokens, apart.received_tokens) == (3 * tile, 256, 0)
    row = shared(512, 2, method="ring", exchange="needed")  # the first rank reads nothing of the second
    assert row.sent_tokens == ((0, 256), (0, 0))
    assert (row.fetched_tokens, row.received_tokens) == (512, 256)


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("method", ["lpt", "zigzag"])
def test_shares_agree_with_the_plan_of_the_sequence_and_with_what_attend_counts(kind: str, method: str) -> None:
    plan = plan_context(DRAWN[kind](4096, 0), 4, method=method)
    k = torch.empty(1, 4, 8, 64, dtype=torch.bfloat16)
    for exchange, needed in (("gather", None), ("needed", plan.needed())):
        share = shared(4096, 4, mask=DRAWN[kind], method=method, exchange=exchange)
        fetched = fetched_keys("keys", share, key_heads=4, head_dim=64, heads=2)
        assert (share.pairs, share.imbalance) == (plan.loads.max(), plan.imbalance)
        received = fetched.groups * fetched.received_bytes
        assert received == plan.received_bytes(2 * 4 * 64 * 2, needed).max()
        room = fetched_bytes(k, k, heads=2, tokens=share.fetched_tokens, backward=True)
        assert 2 * (fetched.num_bytes + fetched.gradient_bytes) == room
        if needed is not None:
            assert max(map(sum, zip(*share.sent_tokens, strict=True))) == share.received_tokens
            assert isinstance(fetched.fetch, Exchange)
            assert isinstance(fetched.give_back, Exchange)
            back = zip(*fetched.fetch.sent_bytes, strict=True)  # in 32 bits
            assert fetched.give_back.sent_bytes == tuple(tuple(2 * size for size in row) for row in back)


def core(tokens: int) -> tuple[LayerSteps, RankHardware]:
    at = RankHardware(cluster=find_cluster("h800", 8), degrees=Degrees(context=4))
    writer = StepWriter(
        shape=CAUSAL, degrees=at.degrees, load=ModuleLoad(sequences=1, tokens=tokens), sharing=ContextSharing(heads=2)
    )
    writer.layer("x")
    step = next(step for step in writer.steps if step.fetched is not None)
    return LayerSteps(steps=(step,), sources={step.reads[0]: 1000}, output=step.writes, trains=True), at


def time_of(graph: Subgraph, name: str) -> int:
    found = next(node for node in graph.nodes if node.name == name)
    assert isinstance(found, OperatorNode)
    return found.time_ns


@pytest.mark.parametrize(("tokens", "computes"), [(65536, True), (1024, False)])
def test_a_group_of_heads_is_fetched_while_the_one_before_is_computed(tokens: int, computes: bool) -> None:
    steps, at = core(tokens)
    forward, backward = forward_graph(steps, at), backward_graph(steps, at, with_weights=True)
    fetch, ran = time_of(forward, "attention fetch 0"), Simulator().run(forward)
    one = time_of(forward, "attention 0")
    assert (one > fetch) == computes
    assert ran.length_ns == fetch + 3 * max(one, fetch) + one  # four groups of two heads

    one, back = time_of(backward, "attention backward 0"), time_of(backward, "attention backward give back 0")
    expected = fetch + 4 * one + back if computes else 4 * (fetch + back)
    assert Simulator().run(backward).length_ns == expected


def test_two_fetched_groups_are_in_memory_and_in_backward_the_gradients_of_two() -> None:
    steps, at = core(65536)
    fetched, local = steps.steps[0].fetched, 1000 + steps.steps[0].num_bytes
    assert fetched is not None
    for graph, more in (
        (forward_graph(steps, at), 0),
        (backward_graph(steps, at, with_weights=True), 2 * fetched.gradient_bytes + local),
    ):
        peak = Simulator().run(graph).timelines(graph, kept=graph.inputs)["compute"].peak_bytes
        assert peak == local + 2 * fetched.num_bytes + more


SHARINGS = st.fixed_dictionaries(
    {
        "mask": st.sampled_from([None, *DRAWN.values()]),
        "method": st.sampled_from(["lpt", "lpt-paper", "zigzag", "ring", "striped", "random"]),
        "exchange": st.sampled_from(["gather", "needed"]),
        "heads": st.sampled_from([1, 2, 4, 8]),
        "seed": st.integers(0, 3),
    }
)


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 40) | st.integers(1, 5).map(lambda count: 8 * count), SHARINGS)
def test_a_rank_takes_its_part_of_the_time_at_least_and_less_memory_with_more_ranks(
    blocks: int, sharing: dict[str, Any]
) -> None:
    tokens = 128 * blocks - 28
    alone = layers(tokens, **sharing)[1]
    kept = alone.strategies[0].kept_bytes
    total = kept + alone.workspace_bytes
    for ranks in (2, 4, 8):
        own = layers(tokens, context=ranks, **sharing)[1]
        assert own.forward_ms >= alone.forward_ms / ranks
        assert own.backward_ms + own.weights_ms >= (alone.backward_ms + alone.weights_ms) / ranks
        if sharing["method"] != "lpt-paper":  # gives ranks unequal numbers of blocks
            assert own.strategies[0].kept_bytes <= kept
            kept = own.strategies[0].kept_bytes
            if blocks % ranks == 0:  # padding, which is fetched too, may be more with more ranks
                assert kept + own.workspace_bytes <= total
                total = kept + own.workspace_bytes
        gather, needed = (
            shared(tokens, ranks, **{**sharing, "exchange": exchange}) for exchange in ("gather", "needed")
        )
        assert needed.received_tokens <= gather.received_tokens
        assert needed.fetched_tokens <= gather.fetched_tokens
        assert max(map(max, needed.sent_tokens)) <= gather.local_tokens


@pytest.mark.parametrize("unit", ["text", "image"])
def test_one_context_rank_is_as_none_bit_for_bit(unit: str) -> None:
    microbatch = Microbatch(text_tokens=1000, images=3)
    plain = module(unit=unit)
    units = plain.units(microbatch)
    for items in ("repeat", "share", "split"):
        same = module(unit=unit, items=items, method="ring", exchange="needed", heads=8, block=64)
        assert same.layers(microbatch, units) == plain.layers(microbatch, units)
        assert same.boundary_bytes(microbatch, units) == plain.boundary_bytes(microbatch, units)


def test_whole_images_are_repeated_or_shared_out_and_their_features_gathered() -> None:
    shape, three = dataclasses.replace(CAUSAL, causal=False), Microbatch(images=3)
    plain, repeated, shared_out, split = (
        module(shape, unit="image", context=context, items=items)
        for context, items in ((1, "repeat"), (2, "repeat"), (2, "share"), (2, "split"))
    )
    assert repeated.layers(three, 3) == plain.layers(three, 3)
    most, two = shared_out.layers(three, 3), plain.layers(three, 2)
    assert most[:-1] == two[:-1]  # the rank with two of the images
    assert most[-1].forward_ms > two[-1].forward_ms
    assert shared_out.boundary_bytes(three, 3) == plain.boundary_bytes(three, 2)
    assert shared_out.output_bytes(three, 3) == 2 * 2 * 256 * 512 * 2  # two ranks' room, as it is gathered
    assert [one.output_bytes(three, 3) for one in (plain, repeated)] == [3 * 256 * 1024 * 2] * 2
    assert shared_out.layers(three, 1) == plain.layers(three, 1)  # fewer images than ranks: each rank encodes all
    assert shared_out.output_bytes(three, 1) == plain.output_bytes(three, 1)
    assert split.boundary_bytes(three, 3) == plain.boundary_bytes(three, 3) / 2
    assert split.fetched(three, 3) is not None
    assert shared_out.fetched(three, 3) is None
    flops = {one.forward_flops(three, 3) for one in (plain, repeated, shared_out, split)}
    assert len(flops) == 1


def test_an_uneven_distribution_and_other_masks_change_the_time_of_attention_alone() -> None:
    even, uneven, packed = (
        layers(16384, context=8, **sharing)[1] for sharing in ({}, {"method": "ring"}, {"mask": DRAWN["mp"]})
    )
    assert packed.forward_ms < even.forward_ms < uneven.forward_ms
    assert even.weights_ms == uneven.weights_ms == packed.weights_ms
    assert even.strategies[0].kept_bytes == uneven.strategies[0].kept_bytes
    assert layers(16384, mask=DRAWN["mp"])[1].forward_ms < layers(16384)[1].forward_ms


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="method='gather'; use one of lpt"):
        ContextSharing(method="gather")
    with pytest.raises(ValueError, match="heads=0"):
        ContextSharing(heads=0)
    with pytest.raises(ValueError, match="heads=3 does not divide 8 heads of keys; use one of"):
        layers(2048, context=2, heads=3)
    with pytest.raises(ValueError, match="4 blocks for 8 ranks"):
        layers(512, context=8)
