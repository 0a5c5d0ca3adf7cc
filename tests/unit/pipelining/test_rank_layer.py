"""Layers on one rank of a described job: collectives, and sequences that context ranks share."""

from __future__ import annotations

from typing import Any

import pytest

from bench.papers.data_sets import Microbatch
from bench.papers.pipeline_layers import Intake, LayerStack, TransformerShape
from mosaic.hardware import find_cluster
from mosaic.pipelining.rank_hardware import Degrees, RankHardware
from mosaic.pipelining.rank_layer import ContextSharing, SequenceShare, share_sequences

CAUSAL = TransformerShape(layers=3, hidden=1024, ffn=4096, heads=16, groups=8, causal=True)


def module(shape: TransformerShape = CAUSAL, *, context: int = 1, unit: Any = "text", **sharing: Any) -> LayerStack:
    return LayerStack(
        name="module",
        shape=shape,
        machine=RankHardware(cluster=find_cluster("h800", 8), degrees=Degrees(context=context)),
        intake=Intake(unit=unit, text=unit == "text", image_tokens=256),
        projects_to=0 if unit == "text" else 512,
        sharing=ContextSharing(**sharing),
    )


def shared(tokens: int, ranks: int, *, sequences: int = 1, is_causal: bool = True, **sharing: Any) -> SequenceShare:
    return share_sequences(
        ContextSharing(**sharing), sequences=sequences, tokens=tokens, ranks=ranks, is_causal=is_causal
    )


def test_small_shares_are_those_worked_out_by_hand() -> None:
    tile = 128 * 128
    assert shared(512, 2).pairs == 5 * tile  # rows of 1, 2, 3 and 4 tiles: 1 + 4 and 2 + 3
    ring = shared(512, 2, method="ring")  # the first rank reads nothing of the second
    assert (ring.pairs, ring.fetched_tokens, ring.sent_tokens) == (7 * tile, 512, ((0, 256), (0, 0)))
    assert shared(500, 2, is_causal=False).pairs == 8 * tile
    assert shared(640, 2).local_tokens == 3 * 128  # five blocks: one place of each but the last is empty
    apart = shared(256, 2, sequences=2)  # a packed sequence each
    assert (apart.pairs, apart.fetched_tokens) == (3 * tile, 256)


@pytest.mark.parametrize("unit", ["text", "image"])
def test_one_context_rank_is_as_none_bit_for_bit(unit: str) -> None:
    microbatch = Microbatch(text_tokens=1000, images=3)
    plain = module(unit=unit)
    units = plain.units(microbatch)
    for items in ("share", "split"):
        same = module(unit=unit, items=items, method="ring", block=64)
        assert same.layers(microbatch, units) == plain.layers(microbatch, units)
        assert same.boundary_bytes(microbatch, units) == plain.boundary_bytes(microbatch, units)
