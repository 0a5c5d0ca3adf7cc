"""Small pipelines for the tests of layer tuning: tasks and orders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from mosaic.graph import Part
from mosaic.pipelining.tasks import ActionKind, Orders, Task, TaskGraph, Wait
from mosaic.pipelining.tuning import Candidate, Pair

MIB = 2**20


def candidate(backward_ns: int, kept_bytes: int, workspace_bytes: int = 0, forward_ns: int = 0) -> Candidate:
    return Candidate(
        strategies=(),
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        kept_bytes=kept_bytes,
        workspace_bytes=workspace_bytes,
    )


def one_f_one_b(
    num_ranks: int, sizes: Sequence[float], *, num_candidates: int = 6, limit_share: float = 0.5, seed: int = 0
) -> tuple[TaskGraph, list[Pair], Orders]:
    """A chain of chunks with ragged microbatches in the order 1F1B, and pairs that keep from all to an eighth."""
    drawn = random.Random(seed)
    tasks: list[Task] = []
    waits: list[Wait] = []
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    pairs: dict[tuple[int, int], tuple[Candidate, ...]] = {}
    works = [drawn.uniform(0.8, 1.2) for _ in range(num_ranks)]
    for microbatch, size in enumerate(sizes):
        for phase, made in ((ActionKind.FORWARD, forward), (ActionKind.BACKWARD, backward)):
            ranks = range(num_ranks) if phase == ActionKind.FORWARD else reversed(range(num_ranks))
            before = None if phase == ActionKind.FORWARD else forward[num_ranks - 1, microbatch]
            for rank in ranks:
                time_ns = int(1e6 * size * works[rank]) * (1 if phase == ActionKind.FORWARD else 2)
                part = Part(module="llm", first=rank, total=num_ranks)
                tasks.append(Task(row=rank, kind=phase, parts=(part,), microbatch=microbatch, time_ns=time_ns))
                made[rank, microbatch] = len(tasks) - 1
                if before is not None:
                    waits.append(Wait(source=before, target=len(tasks) - 1, lag_ns=10_000))
                before = len(tasks) - 1
        for rank in range(num_ranks):
            full, recompute = int(size * works[rank] * 400 * MIB), size * works[rank] * 1e6
            shares = [step / (num_candidates - 1) for step in range(num_candidates)]
            pairs[rank, microbatch] = tuple(
                candidate(
                    int(recompute * share**2 * drawn.uniform(0.9, 1.1)),
                    int(full * (1 - 0.875 * share)),
                    int(full * share / 8),
                )
                for share in shares
            )
    orders = tuple(_rank_order(rank, num_ranks, len(sizes), forward, backward) for rank in range(num_ranks))
    graph = TaskGraph(tasks=tuple(tasks), waits=tuple(waits), rank_of=tuple(range(num_ranks)))
    made_pairs = [
        Pair(forward=forward[key], backward=backward[key], candidates=candidates) for key, candidates in pairs.items()
    ]
    base = 100 * MIB
    limits = []
    for rank in range(num_ranks):
        flying = min(num_ranks - rank, len(sizes))
        most = int(max(sizes) * works[rank] * 400 * MIB * 1.125)
        limits.append(base + most + int(limit_share * most * flying))
    return replace(graph, base_bytes=(base,) * num_ranks, limit_bytes=tuple(limits)), made_pairs, orders


def _rank_order(
    rank: int, num_ranks: int, count: int, forward: dict[tuple[int, int], int], backward: dict[tuple[int, int], int]
) -> tuple[int, ...]:
    warm_up = min(num_ranks - rank, count)
    own = [forward[rank, m] for m in range(warm_up)]
    for microbatch in range(count):
        own.append(backward[rank, microbatch])
        if warm_up + microbatch < count:
            own.append(forward[rank, warm_up + microbatch])
    return tuple(own)
