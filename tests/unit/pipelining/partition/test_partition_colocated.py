"""Modules on lanes beside the backbone of every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipeline_cases import chain, images, two_encoders, vision_and_text

from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.layers import Microbatch
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import roll_out

BOTH = tuple(Microbatch(text_tokens=1, images=count, audio_s=4.0) for count in (2, 4, 1, 3))


def colocated(request: Request) -> Partition:
    return partition_by("colocated", request)


def test_the_backbone_has_lane_0_of_every_rank_and_encoders_the_others():
    partition = colocated(Request(model=two_encoders(), num_ranks=2, microbatches=BOTH, slots_per_rank=8))
    lanes = {
        part.module: {c.lane for c in partition.chunks if part in c.parts} for c in partition.chunks for part in c.parts
    }
    assert lanes["text"] == {0}
    assert 0 not in lanes["vision"] | lanes["audio"]
    for rank in (0, 1):
        shares = {chunk.lane: chunk.share for chunk in partition.chunks if chunk.rank == rank}
        assert sum(shares.values()) == 1
        assert all((8 * share).is_integer() for share in shares.values())


@pytest.mark.parametrize("slots", [2, 4, 16])
def test_no_other_share_of_one_lane_is_simulated_to_be_shorter(slots: int):
    model = vision_and_text(4, 8, text_ms=1.5)
    request = Request(model=model, num_ranks=2, microbatches=images(2, 5, 1, 4), slots_per_rank=slots, sizes={})
    best = colocated(request)

    def step_ns(partition: Partition) -> int:
        return roll_out(task_graph(model, partition, request.microbatches))[1].makespan_ns

    for eighth in (1, 2, 3, 4, 5, 6):
        quota = min(slots - 1, max(1, round(eighth * slots / 8)))
        shares = {0: (slots - quota) / slots, 1: quota / slots}
        chunks = tuple(replace(chunk, share=shares[chunk.lane]) for chunk in best.chunks)
        assert step_ns(best) <= step_ns(replace(best, chunks=chunks))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(model=two_encoders(), num_ranks=1, microbatches=BOTH), "ranks have one slot each"),
        (Request(model=chain(4), num_ranks=1, microbatches=BOTH, slots_per_rank=2), "nothing beside the backbone"),
        (
            Request(model=vision_and_text(4, 3), num_ranks=4, microbatches=images(1), slots_per_rank=2),
            "'text' has 3 layers for 4 ranks",
        ),
    ],
)
def test_where_no_lanes_can_be_is_said(request_: Request, message: str):
    with pytest.raises(ValueError, match=message):
        colocated(request_)
