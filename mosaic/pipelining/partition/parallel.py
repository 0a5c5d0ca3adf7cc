"""Modules on their own ranks, encoders side by side (Cornstarch, 4.1), with numbers of ranks by its Algorithm 1.

Two encoders ``v`` and ``a`` before a text model ``t``, on their own ranks, or on lanes of one, which is our own::

    rank      0    1    2    3    4         rank      0     1    2    3    4
    parallel  v    v    a    t    t         lanes     v a   t    t    t    t
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mosaic.pipelining.partition.backward import sources_of
from mosaic.pipelining.partition.mixed import balanced_ends
from mosaic.pipelining.partition.partition import Chunk, Partition, parts_of
from mosaic.pipelining.partition.request import Request, backbone_of, layer_times

MAX_LANES = 4
"""Most lanes of a rank: more would be too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A module cut into chunks."""

    ends: tuple[int, ...]
    """End layer of each chunk."""
    chunk_ms: tuple[float, ...]
    """Time of all phases of each chunk."""

    @classmethod
    def of(cls, times: Sequence[float], count: int) -> _Cut:
        """Cuts with the shortest longest chunk."""
        ends = balanced_ends(times, count)
        starts = (0, *ends[:-1])
        return cls(ends=ends, chunk_ms=tuple(math.fsum(times[a:b]) for a, b in zip(starts, ends, strict=True)))


def on_own_ranks(request: Request, fixed: Mapping[str, int] = MappingProxyType({})) -> Partition:
    """Assigns each module its own ranks by Algorithm 1.

    For each number of chunks of the backbone, every other module has the fewest chunks whose longest takes no longer
    than the backbone's longest, as far as ranks allow; the result has the shortest step by ``step_ms``.

    Args:
        request: Model, ranks and microbatches.
        fixed: Numbers of ranks of modules that are not chosen.

    Raises:
        ValueError: Modules, or fixed numbers, need more ranks.
    """
    times = layer_times(request)
    backbone = backbone_of(request.model)
    counts = {name: fixed.get(name, 1) for name in times}
    _check_ranks(request, sum(counts.values()))
    free = [name for name in times if name != backbone and name not in fixed]
    most = request.num_ranks - sum(counts.values()) + counts[backbone]
    trials = []
    last = counts[backbone] if backbone in fixed else min(most, len(times[backbone]))
    for count in range(counts[backbone], last + 1):
        cuts = {name: _Cut.of(own, count if name == backbone else counts[name]) for name, own in times.items()}
        for _ in range(most - count):
            longest = max(
                (name for name in free if len(cuts[name].ends) < len(times[name])),
                key=lambda name: max(cuts[name].chunk_ms),
                default=backbone,
            )
            if longest == backbone or max(cuts[longest].chunk_ms) <= max(cuts[backbone].chunk_ms):
                break
            cuts[longest] = _Cut.of(times[longest], len(cuts[longest].ends) + 1)
        trials.append((step_ms(request, {name: cut.chunk_ms for name, cut in cuts.items()}), count, cuts))
    _, _, best = min(trials, key=lambda trial: trial[:2])
    return on_given_ranks(request, {name: len(cut.ends) for name, cut in best.items()})


def on_given_ranks(request: Request, counts: Mapping[str, int]) -> Partition:
    """Assigns each module its own ``counts`` of ranks, one module after the other.

    Raises:
        ValueError: A module has no ranks or more than layers, or the sum exceeds the request.
    """
    times = layer_times(request)
    _check_ranks(request, sum(counts.values()))
    chunks: list[Chunk] = []
    for name, own in times.items():
        for part in parts_of(name, balanced_ends(own, counts.get(name, 0))):
            chunks.append(Chunk(parts=(part,), rank=len(chunks)))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks))


def encoders_colocated(request: Request, num_front: int) -> Partition:
    """Puts all encoders on the same ``num_front`` ranks, one after the other, and the backbone on the others.

    All encoders have as many chunks, as in the comparison of Cornstarch's Table 2 for two encoders or more.

    Raises:
        ValueError: No ranks are left, a module has fewer layers than ranks, or an encoder feeds another.
    """
    times = layer_times(request)
    backbone = backbone_of(request.model)
    encoders = [name for name in times if name != backbone]
    _check_encoders(request, encoders, backbone)
    _check_ranks(request, num_front + 1)
    fronts = zip(*(parts_of(name, balanced_ends(times[name], num_front)) for name in encoders), strict=True)
    chunks = [Chunk(parts=parts, rank=rank) for rank, parts in enumerate(fronts)]
    ends = balanced_ends(times[backbone], request.num_ranks - num_front)
    chunks += (Chunk(parts=(part,), rank=num_front + at) for at, part in enumerate(parts_of(backbone, ends)))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks))


def on_lanes(request: Request) -> Partition:
    """Puts the backbone on its own ranks, and all encoders side by side on lanes of the ranks before.

    Each encoder is cut into as many chunks as such ranks, or as it has layers; its lane's share is its part of the
    encoders' time. The number of ranks follows Algorithm 1, with encoders slowed by their shares.

    Raises:
        ValueError: The request has one rank, encoders feed each other, or outnumber the lanes of a rank.
    """
    times = layer_times(request)
    backbone = backbone_of(request.model)
    encoders = [name for name in times if name != backbone]
    _check_encoders(request, encoders, backbone)
    if len(encoders) > MAX_LANES:
        raise ValueError(f"{len(encoders)} encoders; a rank has at most {MAX_LANES} lanes: use another partition")
    _check_ranks(request, 2)
    whole = {name: math.fsum(times[name]) for name in encoders}
    total = math.fsum(whole.values())
    shares = {name: whole[name] / total if total and whole[name] else 1 / len(encoders) for name in encoders}
    scale = max(1.0, math.fsum(shares.values()))
    shares = {name: share / scale for name, share in shares.items()}
    trials = []
    for count in range(1, min(request.num_ranks - 1, len(times[backbone])) + 1):
        front = min(request.num_ranks - count, max(len(times[name]) for name in encoders))
        cuts = {name: _Cut.of(times[name], min(front, len(times[name]))) for name in encoders}
        cuts[backbone] = _Cut.of(times[backbone], count)
        slowed = {name: tuple(time / shares.get(name, 1.0) for time in cut.chunk_ms) for name, cut in cuts.items()}
        trials.append((step_ms(request, slowed), count, front, cuts))
    _, _, front, best = min(trials, key=lambda trial: trial[:2])
    chunks = []
    for name in times:
        is_lane = name != backbone
        for at, part in enumerate(parts_of(name, best[name].ends)):
            rank = at + front - len(best[name].ends) if is_lane else at + front
            lane = encoders.index(name) if is_lane else 0
            chunks.append(Chunk(parts=(part,), rank=rank, lane=lane, share=shares[name] if is_lane else 1.0))
    return Partition(num_ranks=request.num_ranks, chunks=tuple(chunks))


def step_ms(request: Request, chunk_ms: Mapping[str, Sequence[float]]) -> float:
    """Estimates a step: the longest path through all chunks, and the longest chunk for each further microbatch.

    Alpa's formula (https://arxiv.org/abs/2201.12023, section 5), over a graph of modules instead of a chain.
    """
    sources = sources_of(request.model, chunk_ms)
    ends: dict[str, float] = {}
    for name, before in sources.items():
        ends[name] = math.fsum(chunk_ms[name]) + max((ends[source] for source in before), default=0.0)
    longest = max(time for times in chunk_ms.values() for time in times)
    return max(ends.values()) + (len(request.microbatches) - 1) * longest


def _check_ranks(request: Request, needed: int) -> None:
    if request.num_ranks < needed:
        raise ValueError(
            f"num_ranks={request.num_ranks}; modules on ranks of their own need {needed} or more: use more"
        )


def _check_encoders(request: Request, encoders: Sequence[str], backbone: str) -> None:
    for feed in request.model.feeds:
        if feed.target != backbone or feed.source not in encoders:
            raise ValueError(
                f"{feed.source!r} feeds {feed.target!r}; on the same ranks stand modules that feed {backbone!r} and "
                "nothing else: use another partition"
            )
    if not encoders:
        raise ValueError(f"0 modules beside the backbone {backbone!r}; use another partition")
