"""Task graphs at random: encoders cut into pieces before a backbone of several segments, on a pipeline of ranks."""

from __future__ import annotations

import itertools
import random

from mosaic.graph import Part
from mosaic.pipelining.tasks import ActionKind, Task, TaskGraph, Wait

FORWARD, BACKWARD, WEIGHTS = ActionKind


class StepBuilder:
    """Adds modules of microbatches one after the other."""

    def __init__(self, ranks: int, *, lag_ns: int = 0, lanes: bool = False, apart: bool = False) -> None:
        self.ranks, self.lag_ns, self.lanes, self.apart = ranks, lag_ns, lanes, apart
        self.tasks: list[Task] = []
        self.waits: list[Wait] = []
        self.groups = 0

    def add(self, **given) -> int:
        self.tasks.append(Task(**given))
        return len(self.tasks) - 1

    def wait(self, source: int, target: int) -> None:
        apart = self.tasks[source].row % self.ranks != self.tasks[target].row % self.ranks
        self.waits.append(Wait(source=source, target=target, lag_ns=self.lag_ns if apart else 0))

    def module(self, name: str, microbatch: int, pieces: int, segments: int, times: tuple[int, int], size: int):
        """Returns for each piece its first and last forward, and its first and last backward."""
        ends = []
        row_of = [rank + (self.ranks if self.lanes and name != "text" else 0) for rank in range(self.ranks)] * segments
        for piece in range(pieces):
            same = {"microbatch": microbatch, "piece": piece, "group": self.groups}
            parts = [(Part(module=name, first=i, count=1, total=len(row_of)),) for i in range(len(row_of))]
            forward = [
                self.add(row=row, kind=FORWARD, parts=part, time_ns=times[0], takes_bytes=size + size // 4,
                         frees_bytes=size // 4, **same)
                for row, part in zip(row_of, parts, strict=True)
            ]  # fmt: skip
            backward = []
            for at in reversed(range(len(row_of))):
                kept = size // 2 if self.apart else 0
                backward.append(
                    self.add(row=row_of[at], kind=BACKWARD, parts=parts[at], time_ns=times[1],
                             takes_bytes=size // 2, frees_bytes=size + size // 2 - kept, **same)
                )  # fmt: skip
                if self.apart:
                    weights = self.add(row=row_of[at], kind=WEIGHTS, parts=parts[at], time_ns=times[0],
                                       frees_bytes=kept, **same)  # fmt: skip
                    self.wait(backward[-1], weights)
            for chain in (forward, backward):
                for source, target in itertools.pairwise(chain):
                    self.wait(source, target)
            ends.append((forward[0], forward[-1], backward[0], backward[-1]))
        self.groups += 1
        return ends


def random_step(
    seed: int,
    *,
    ranks: int = 2,
    microbatches: int = 2,
    segments: int = 1,
    max_pieces: int = 2,
    lag_ns: int = 0,
    lanes: bool = False,
    apart: bool = False,
    room: float | None = None,
) -> TaskGraph:
    """Encoders and a backbone.

    ``room``: each rank's memory, as a share of what all microbatches hold there, and enough
    for any one of them."""
    draw = random.Random(seed)
    build = StepBuilder(ranks, lag_ns=lag_ns, lanes=lanes, apart=apart)
    for microbatch in range(microbatches):
        inputs = []
        for name in ("vision", "audio")[: 1 + (seed % 3 == 0)]:
            time = draw.randint(3, 12)
            pieces = draw.randint(0, max_pieces)
            inputs += build.module(name, microbatch, pieces, 1, (time, 2 * time), draw.randint(1, 5) * 4)
        time = draw.randint(8, 14)
        ((first, last, back, end),) = build.module("text", microbatch, 1, segments, (time, 2 * time), 16)
        build.wait(last, back)
        for _, last_in, back_in, _ in inputs:
            build.wait(last_in, first)
            build.wait(end, back_in)
    lanes_of = tuple(range(ranks)) * (2 if lanes else 1)
    return limited(build, lanes_of, room)


def limited(build: StepBuilder, rank_of: tuple[int, ...], room: float | None) -> TaskGraph:
    limits: tuple[int, ...] = ()
    if room is not None:
        held = [[0] * build.ranks for _ in range(1 + max(task.microbatch for task in build.tasks))]
        for task in build.tasks:
            held[task.microbatch][rank_of[task.row]] += max(0, task.takes_bytes - task.frees_bytes)
        limits = tuple(max(*column, int(room * sum(column))) + 18 for column in zip(*held, strict=True))
    return TaskGraph(tasks=tuple(build.tasks), waits=tuple(build.waits), rank_of=rank_of, limit_bytes=limits)
