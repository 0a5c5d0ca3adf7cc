"""Partitions: what they refuse, which chunks their methods make, and what those balance."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import chain, images, models, plain, steps, two_encoders, vision_and_text

from mosaic.graph import Part
from mosaic.pipelining.partition.methods import PARTITION_METHODS, partition_by
from mosaic.pipelining.partition.mixed import balanced_ends, segments_of
from mosaic.pipelining.partition.parallel import encoders_colocated, on_given_ranks, step_ms
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.partition.request import Request, backbone_of, even_pieces, layer_times, smallest_efficient
from mosaic.pipelining.workload.layers import Feed, PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch


def of(module: str, first: int, count: int, total: int = 4) -> Part:
    return Part(module=module, first=first, count=count, total=total)


def sums(times: list[float], ends: tuple[int, ...]) -> list[float]:
    return [math.fsum(times[start:end]) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((), "at least one chunk"),
        ((Chunk(parts=(of("a", 0, 2),), rank=0),), "layers 2 to 4 of 'a' are in no chunk"),
        ((Chunk(parts=(of("a", 0, 4),), rank=0), Chunk(parts=(of("a", 2, 2),), rank=1)), "follows layer 4 of 4"),
        ((Chunk(parts=(of("a", 2, 2),), rank=0), Chunk(parts=(of("a", 0, 2),), rank=1)), "follows layer 0 of 4"),
        ((Chunk(parts=(of("a", 0, 4),), rank=2),), "on rank 2; there are 2"),
        (
            (
                Chunk(parts=(of("a", 0, 4),), rank=0, share=0.6),
                Chunk(parts=(of("b", 0, 4),), rank=0, lane=1, share=0.6),
            ),
            "lanes of rank 0 have 1.2",
        ),
        (
            (Chunk(parts=(of("a", 0, 4),), rank=0, share=0.6), Chunk(parts=(of("b", 0, 4),), rank=0, share=0.4)),
            "has the shares 0.6 and 0.4",
        ),
    ],
)
def test_a_partition_refuses_chunks_that_are_none(chunks: tuple[Chunk, ...], message: str):
    with pytest.raises(ValueError, match=message):
        Partition(num_ranks=2, chunks=chunks)


@pytest.mark.parametrize(
    ("parts", "values", "message"),
    [
        ((), {}, "one part or more"),
        ((of("a", 0, 1), of("a", 1, 1)), {}, "each of another module"),
        ((of("a", 0, 4),), {"share": math.nan}, "share=nan"),
        ((of("a", 0, 4),), {"rank": -1}, "count from 0"),
    ],
)
def test_a_chunk_refuses_what_it_cannot_be(parts: tuple[Part, ...], values: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        Chunk(**{"parts": parts, "rank": 0, **values})


def test_a_partition_of_another_model_or_against_the_data_is_refused():
    model = vision_and_text(4, 4)
    vision, text = Chunk(parts=(of("vision", 0, 4),), rank=0), Chunk(parts=(of("text", 0, 4),), rank=0)
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


@given(st.integers(0, 40), st.integers(1, 12))
def test_pieces_are_as_few_as_they_can_be_and_differ_by_one_unit(units: int, size: int):
    pieces = even_pieces(units, size)
    assert sum(pieces) == units
    assert len(pieces) == math.ceil(units / size)
    assert not pieces or (max(pieces) <= size and max(pieces) - min(pieces) <= 1)


def test_the_smallest_piece_with_95_percent_of_the_best_efficiency_is_taken():
    module = plain("vision", 2, 1.0, fixed_ms=1.0)  # n units in n + 1: n / (n + 1) of the best there could be
    assert smallest_efficient(module, Microbatch(images=1)) == 1
    assert smallest_efficient(module, Microbatch(images=20)) == 10  # 10/11 of at best 20/21
    assert smallest_efficient(module, Microbatch(images=20), min_efficiency=0.5) == 1


def test_segments_are_whole_multiples_of_the_shortest_module():
    most = {"a": 100, "b": 100, "c": 3, "d": 9}
    assert segments_of({"a": 1.0, "b": 3.9, "c": 50.0, "d": 0.0}, most) == {"a": 1, "b": 3, "c": 3, "d": 1}
    assert segments_of({"a": 0.1, "b": 0.1 + 0.2}, most) == {"a": 1, "b": 3}  # rounding loses no segment


def test_separated_chunks_hold_one_module_each_and_pass_over_all_ranks():
    partition = partition_by("separated-even", Request(model=vision_and_text(), num_ranks=4, microbatches=images(2, 2)))
    assert [(str(chunk), chunk.rank, chunk.segment) for chunk in partition.chunks][4:] == [
        (f"text[{at}:{at + 1}/8]", at % 4, at // 4) for at in range(8)
    ]
    assert dict(partition.sizes) == {"vision": 1}


@pytest.mark.parametrize(
    ("layers", "feeds", "backbone"),
    [
        ({"vision": 9, "text": 2}, ["vision text"], "text"),  # an encoder is a source, however large
        ({"text": 9, "video": 2}, ["text video"], "video"),
        ({"vision": 9, "projector": 1, "text": 5}, ["vision projector", "projector text"], "text"),
        ({"vision": 9, "text": 5, "image": 2}, ["vision text", "text image"], "text"),
        ({"vision": 3, "audio": 3, "text": 2}, ["vision text", "audio text"], "text"),
        ({"text": 4}, [], "text"),
        ({"a": 2, "b": 2}, [], "b"),
    ],
)
def test_the_backbone_is_where_all_data_pass(layers: dict[str, int], feeds: list[str], backbone: str):
    model = PipelineModel(
        modules=tuple(plain(name, count) for name, count in layers.items()),
        feeds=tuple(Feed(source=source, target=target) for source, target in map(str.split, feeds)),
    )
    assert backbone_of(model) == backbone


def test_frozen_layers_count_by_what_they_compute():
    vision = plain("vision", 2, trains=False)
    projector = plain("projector", 1)
    text = plain("text", 2, trains=False, counts="all")
    model = PipelineModel(
        modules=(vision, projector, text),
        feeds=(Feed(source="vision", target="projector"), Feed(source="projector", target="text")),
    )
    aware = layer_times(Request(model=model, num_ranks=1, microbatches=images(1)))
    assert aware == {"vision": (1.0, 1.0), "projector": (2.0,), "text": (2.0, 2.0)}
    again = layer_times(Request(model=model, num_ranks=1, microbatches=images(1), strategy="recompute"))
    assert again == {"vision": (1.0, 1.0), "projector": (3.0,), "text": (3.0, 3.0)}
    unaware = layer_times(Request(model=model, num_ranks=1, microbatches=images(1), frozen_aware=False))
    assert set(itertools.chain.from_iterable(unaware.values())) == {3.0}
    skipped = layer_times(Request(model=model, num_ranks=1, microbatches=images(0)))
    assert skipped["text"] == (1.0, 1.0)  # nothing before it trains in a microbatch of text alone


def test_parallel_modules_have_ranks_of_their_own_and_lanes_share_them():
    microbatches = (Microbatch(text_tokens=1, images=2, audio_s=4.0),) * 4
    request = Request(model=two_encoders(), num_ranks=3, microbatches=microbatches)
    own = partition_by("parallel", request)
    assert len({chunk.rank for chunk in own.chunks}) == len(own.chunks) == 3
    lanes = partition_by("lanes", request)
    front = [chunk for chunk in lanes.chunks if chunk.parts[0].module != "text"]
    assert {(chunk.rank, chunk.lane) for chunk in front} == {(0, 0), (0, 1)}
    assert math.fsum(chunk.share for chunk in front) == pytest.approx(1)
    assert front[0].share == pytest.approx(34 / 56)  # first layers have no backward for inputs


def test_numbers_of_ranks_can_be_given_and_encoders_colocated():
    microbatches = (Microbatch(text_tokens=1, images=2, audio_s=4.0),) * 4
    request = Request(model=two_encoders(), num_ranks=5, microbatches=microbatches)
    given = on_given_ranks(request, {"vision": 2, "audio": 1, "text": 2})
    assert [(chunk.parts[0].module, chunk.rank) for chunk in given.chunks] == [
        ("vision", 0),
        ("vision", 1),
        ("audio", 2),
        ("text", 3),
        ("text", 4),
    ]
    together = encoders_colocated(request, 2)
    assert [str(chunk) for chunk in together.chunks][:2] == [
        "vision[0:3/6]+audio[0:2/4]",
        "vision[3:6/6]+audio[2:4/4]",
    ]
    assert [chunk.rank for chunk in together.chunks] == [0, 1, 2, 3, 4]
    together.check_covers(request.model)
    with pytest.raises(ValueError, match="need 6"):
        on_given_ranks(request, {"vision": 2, "audio": 2, "text": 2})
    with pytest.raises(ValueError, match="4 layers for 0 chunks"):
        on_given_ranks(request, {"vision": 2, "text": 2})


def test_algorithm_1_takes_the_best_numbers_of_ranks():
    microbatches = (Microbatch(text_tokens=1, images=3, audio_s=6.0),) * 6
    model = two_encoders()
    times = layer_times(Request(model=model, num_ranks=1, microbatches=microbatches))
    found = []
    for num_ranks in range(3, 8):
        request = Request(model=model, num_ranks=num_ranks, microbatches=microbatches)
        partition = partition_by("parallel", request)
        chunk_ms = {
            name: [sum(own[part.first : part.end]) for c in partition.chunks for part in c.parts if part.module == name]
            for name, own in times.items()
        }
        found.append(step_ms(request, chunk_ms))
    assert found == sorted(found, reverse=True)  # more ranks are no worse


@pytest.mark.parametrize(
    ("name", "model", "num_ranks", "message"),
    [
        ("separated", vision_and_text(3, 8), 4, "'vision' has 3 layers for 4 ranks"),
        ("mixed-time", chain(3), 4, "3 layers for 4 chunks"),
        ("parallel", two_encoders(), 2, "modules on ranks of their own need 3"),
        ("lanes", chain(4), 2, "0 modules beside the backbone"),
        ("sideways", chain(4), 2, "choose one of: separated"),
    ],
)
def test_too_few_layers_or_ranks_are_refused(name: str, model: PipelineModel, num_ranks: int, message: str):
    with pytest.raises(ValueError, match=message):
        partition_by(name, Request(model=model, num_ranks=num_ranks, microbatches=images(1, 2)))


def test_a_request_needs_ranks_and_microbatches_that_pass_through_something():
    with pytest.raises(ValueError, match="num_ranks=0"):
        Request(model=chain(4), num_ranks=0, microbatches=images(1))
    with pytest.raises(ValueError, match="no microbatches"):
        Request(model=chain(4), num_ranks=1, microbatches=())
    with pytest.raises(ValueError, match="passes through any module"):
        Request(model=PipelineModel(modules=(plain("vision", 2),)), num_ranks=1, microbatches=images(0))


@settings(max_examples=40, deadline=None)
@given(models(min_layers=4), steps(), st.sampled_from(sorted(PARTITION_METHODS)), st.integers(1, 4))
def test_every_method_covers_the_model_or_says_why_not(model, microbatches, name: str, num_ranks: int):
    try:
        request = Request(model=model, num_ranks=num_ranks, microbatches=microbatches, slots_per_rank=4)
        partition_by(name, request).check_covers(model)
    except ValueError:
        if name not in ("parallel", "lanes", "colocated", "mixed-v"):
            raise
