"""The schedules of chains of equal chunks: each rank's slots by a formula.

Chunk c is on rank c mod P, or in a V on the rank that a ball reaches that falls down all ranks and bounces back. Slots
are written as torch writes them: ``0F1`` is chunk 0's forward of microbatch 1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from mosaic.pipelining.baselines.slots import B, F, Slot, W
from mosaic.pipelining.compiled import ActionKind


def gpipe(num_ranks: int, num_microbatches: int, chunks_per_rank: int = 1) -> list[list[Slot]]:
    """Every forward, then every backward (https://arxiv.org/abs/1811.06965); of several chunks one after the other."""
    rows = []
    for rank in range(num_ranks):
        own = range(rank, num_ranks * chunks_per_rank, num_ranks)
        forward = [Slot(chunk, F, at) for chunk in own for at in range(num_microbatches)]
        rows.append(forward + [Slot(slot.chunk, B, slot.microbatch) for slot in reversed(forward)])
    return rows


def one_f_one_b(depths: Sequence[int], num_microbatches: int) -> list[list[Slot]]:
    """One chunk a rank, the c-th ``depths[c]`` chunks before the end: so many forwards, then in turn (PipeDream-Flush).

    With depths 2, 1, 0 and four microbatches::

        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    return [
        _in_turn(
            [Slot(chunk, F, at) for at in range(num_microbatches)],
            [Slot(chunk, B, at) for at in range(num_microbatches)],
            min(depth, num_microbatches),
        )
        for chunk, depth in enumerate(depths)
    ]


def interleaved(
    num_ranks: int, num_microbatches: int, chunks_per_rank: int, *, delays_weights: bool = False
) -> list[list[Slot]]:
    """Several chunks a rank, P microbatches through each in turn (https://arxiv.org/abs/2104.04473, section 2.2).

    With ``delays_weights`` it is ZB-H1 (https://arxiv.org/abs/2401.10241, section 3.1): one forward less at a hop from
    the end, and backward for weights as many backwards late as there are ranks before, so that memory stays that of
    1F1B. With one chunk a rank these are 1F1B and ZB-H1 as published.

    Raises:
        ValueError: The microbatches are no multiple of the ranks, with several chunks a rank; Megatron's rule.
    """
    if chunks_per_rank > 1 and num_microbatches % num_ranks:
        raise ValueError(
            f"{num_microbatches} microbatches on {num_ranks} ranks with {chunks_per_rank} chunks each; interleaving "
            f"takes P microbatches at a time: use a multiple of {num_ranks}, or one chunk a rank"
        )
    rows = []
    hop = 1 if delays_weights or chunks_per_rank == 1 else 2
    group = num_ranks if chunks_per_rank > 1 else num_microbatches
    for rank in range(num_ranks):
        own = range(rank, num_ranks * chunks_per_rank, num_ranks)
        forward = by_groups(own, F, num_microbatches, group)
        backward = by_groups(own[::-1], B, num_microbatches, group)
        warm_up = min((chunks_per_rank - 1) * group + hop * (num_ranks - 1 - rank), len(forward))
        row = _in_turn(forward, backward, warm_up)
        rows.append(_with_late_weights(row, rank) if delays_weights else row)
    return rows


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> list[list[Slot]]:
    """Two chunks a rank in a V, backward for weights apart (https://arxiv.org/abs/2401.10241, section 6)."""
    count = max(2 * num_ranks - 1, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        row = _Row(down=rank, up=2 * num_ranks - 1 - rank)
        row.repeat(2 * (num_ranks - rank) - 1, "F0")
        row.repeat(rank, "F1 F0")
        row.repeat(num_ranks - rank, "F1 B1 W1")
        for _ in range(count - row.done(F, row.down)):
            row.repeat(1, "F0 B0 W0 F1 B1 W1")
        row.repeat(count - row.done(F, row.up), "B0 W0 F1 B1 W1")
        row.repeat(rank, "B0 B1")
        row.repeat(num_ranks - rank, "B0 W0")
        row.repeat(row.done(B, row.up) - row.done(W, row.up), "W1")
        row.repeat(row.done(B, row.down) - row.done(W, row.down), "W0")
        rows.append([slot for slot in row.slots if slot.microbatch < num_microbatches])
    return rows


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> list[list[Slot]]:
    """DeepSeek's DualPipeV (https://github.com/deepseek-ai/DualPipe), one phase after the other where it overlaps two.

    ``b`` is a backward whose weights come at once; after ``B`` they come with the next ``W``, the oldest first.

    Raises:
        ValueError: There are fewer than two microbatches a rank.
    """
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"{num_microbatches} microbatches on {num_ranks} ranks; DualPipeV starts with two a rank: use at least "
            f"{2 * num_ranks}"
        )
    rows = []
    for rank in range(num_ranks):
        row = _Row(down=rank, up=2 * num_ranks - 1 - rank)
        after = num_ranks - 1 - rank
        row.repeat(2 * after, "F0")
        row.repeat(rank + 1, "F0 F1")
        row.repeat(after, "B1 W F1")
        row.repeat(num_microbatches - 2 * num_ranks + rank + 1, "F0 b1 F1 b0")
        row.repeat(after, "b1 F1 b0")
        both = (rank + 1) // 2
        row.repeat(both, "b1 b0")
        row.repeat((rank + 1) % 2, "b1 B0")
        row.repeat(both, "B1 B0")
        row.repeat(after, "W B0")
        row.repeat(rank + 1, "W")
        rows.append(row.slots)
    return rows


class _Row:
    """A rank's slots as they are written, with the next microbatch of each phase of its two chunks."""

    def __init__(self, *, down: int, up: int) -> None:
        self.down, self.up = down, up
        self.slots: list[Slot] = []
        self._next = Counter[tuple[ActionKind, int]]()
        self._late = deque[Slot]()

    def done(self, kind: ActionKind, chunk: int) -> int:
        """Returns how many microbatches had that phase of that chunk."""
        return self._next[kind, chunk]

    def repeat(self, times: int, phases: str) -> None:
        """Writes phases such as ``F0 B1`` that many times; ``W`` is the oldest that is late, if any is."""
        for _ in range(times):
            for phase in phases.split():
                self._write(phase)

    def _write(self, phase: str) -> None:
        if phase == "W":
            if self._late:
                self.slots.append(self._late.popleft())
            return
        chunk = self.up if phase[1] == "1" else self.down
        slot = self._put(ActionKind(phase[0].upper()), chunk)
        if phase[0] == "b":
            self.slots.append(Slot(chunk, W, slot.microbatch))
        elif phase[0] == "B":
            self._late.append(Slot(chunk, W, slot.microbatch))

    def _put(self, kind: ActionKind, chunk: int) -> Slot:
        self.slots.append(Slot(chunk, kind, self._next[kind, chunk]))
        self._next[kind, chunk] += 1
        return self.slots[-1]


def by_groups(chunks: Sequence[int], kind: ActionKind, num_microbatches: int, group: int) -> list[Slot]:
    """Returns a phase of a group of microbatches through each chunk in turn, then of the next group."""
    return [
        Slot(chunk, kind, at)
        for start in range(0, num_microbatches, group)
        for chunk in chunks
        for at in range(start, min(start + group, num_microbatches))
    ]


def _in_turn(forward: Sequence[Slot], backward: Sequence[Slot], warm_up: int) -> list[Slot]:
    """So many forwards, then one forward and one backward in turn, then what backwards are left."""
    row = list(forward[:warm_up])
    for one, other in zip(forward[warm_up:], backward, strict=False):
        row += [one, other]
    return row + list(backward[len(forward) - warm_up :])


def _with_late_weights(row: Sequence[Slot], late: int) -> list[Slot]:
    """Puts each backward for weights behind the backward that is ``late`` backwards after its own, or at the end."""
    found: list[Slot] = []
    waiting = deque[Slot]()
    for slot in row:
        found.append(slot)
        if slot.kind is B:
            waiting.append(Slot(slot.chunk, W, slot.microbatch))
            if len(waiting) > late:
                found.append(waiting.popleft())
    return found + list(waiting)
