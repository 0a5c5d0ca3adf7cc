"""Partitions: refused chunks, the methods' chunks, and their balance."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import chain, images, models, steps, two_encoders, vision_and_text

from mosaic.graph import Part
from mosaic.pipelining.cuts import PARTITION_METHODS, balanced_ends, partition_by
from mosaic.pipelining.layers import PipelineModel
from mosaic.pipelining.partition import Chunk, Partition, Request


def chunk(module: str, first: int = 0, count: int = 4, rank: int = 0, **more: Any) -> Chunk:
    return Chunk(parts=(Part(module=module, first=first, count=count, total=4),), rank=rank, **more)


def sums(times: list[float], ends: tuple[int, ...]) -> list[float]:
    return [math.fsum(times[start:end]) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((), "at least one chunk"),
        ((chunk("a", 0, 2),), "layers 2 to 4 of 'a' are in no chunk"),
        ((chunk("a"), chunk("a", 2, 2, 1)), "follows layer 4 of 4"),
        ((chunk("a", 2, 2), chunk("a", 0, 2, 1)), "follows layer 0 of 4"),
        ((chunk("a", rank=2),), "on rank 2; there are 2"),
        ((chunk("a", share=0.6), chunk("b", lane=1, share=0.6)), "lanes of rank 0 have 1.2"),
        ((chunk("a", share=0.6), chunk("b", share=0.4)), "has the shares 0.6 and 0.4"),
    ],
)
def test_a_partition_refuses_chunks_that_are_none(chunks: tuple[Chunk, ...], message: str):
    with pytest.raises(ValueError, match=message):
        Partition(num_ranks=2, chunks=chunks)


def test_a_partition_of_another_model_or_against_the_data_is_refused():
    model = vision_and_text(4, 4)
    vision, text = chunk("vision"), chunk("text")
    Partition(num_ranks=1, chunks=(vision, text)).check_covers(model)
    with pytest.raises(ValueError, match="put chunks in the order"):
        Partition(num_ranks=1, chunks=(text, vision)).check_covers(model)
    with pytest.raises(ValueError, match="they differ by vision"):
        Partition(num_ranks=1, chunks=(text,)).check_covers(model)
    with pytest.raises(ValueError, match="has 5"):
        Partition(num_ranks=1, chunks=(vision, text)).check_covers(vision_and_text(5, 4))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 3.0, 20.0]), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_shorter_longest_range(times: list[float], data: st.DataObject):
    count = data.draw(st.integers(1, len(times)))
    ends = balanced_ends(times, count)
    cuts = ((*inner, len(times)) for inner in itertools.combinations(range(1, len(times)), count - 1))
    assert len(ends) == count
    assert all(before < after for before, after in itertools.pairwise((0, *ends)))
    assert max(sums(times, ends)) == min(max(sums(times, one)) for one in cuts)


@pytest.mark.parametrize(
    ("name", "model", "num_ranks", "slots", "message"),
    [
        ("separated", vision_and_text(3, 8), 4, 1, "'vision' has 3 layers for 4 ranks"),
        ("mixed-time", chain(3), 4, 1, "3 layers for 4 chunks"),
        ("parallel", two_encoders(), 2, 1, "modules on ranks of their own need 3"),
        ("colocated", two_encoders(), 1, 1, "ranks have one slot each"),
        ("colocated", chain(4), 1, 2, "nothing beside the backbone"),
        ("colocated", vision_and_text(4, 3), 4, 2, "'text' has 3 layers for 4 ranks"),
    ],
)
def test_too_few_layers_ranks_or_slots_are_refused(
    name: str, model: PipelineModel, num_ranks: int, slots: int, message: str
):
    request = Request(model=model, num_ranks=num_ranks, microbatches=images(1, 2), slots_per_rank=slots)
    with pytest.raises(ValueError, match=message):
        partition_by(name, request)


@settings(max_examples=40, deadline=None)
@given(models(min_layers=4), steps(), st.sampled_from(sorted(PARTITION_METHODS)), st.integers(1, 4))
def test_every_method_covers_the_model_or_says_why_not(model, microbatches, name: str, num_ranks: int):
    try:
        request = Request(model=model, num_ranks=num_ranks, microbatches=microbatches, slots_per_rank=4)
        partition_by(name, request).check_covers(model)
    except ValueError:
        if name not in ("parallel", "colocated", "mixed-v"):
            raise
