"""A memory shortage under every choice of candidates, with remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.pipelining.rank_memory import rank_timelines
from mosaic.pipelining.tasks import TaskGraph
from mosaic.pipelining.tuning.pairs import Pair, RankPairs

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShortage:
    """Orders that do not fit under any strategies; ``str`` has the remedies.

    The figures are for the leanest candidates, on the rank with the largest shortage.
    """

    rank: int
    at_ns: int
    """Time of the largest shortage."""
    short_bytes: int
    """The shortage."""
    limit_bytes: int
    """Memory of the rank."""
    base_bytes: int
    """Constant bytes of the rank: weights, gradients, optimizer state."""
    microbatches: tuple[int, ...]
    """Microbatches whose activations are in use then."""
    held_bytes: int
    """Bytes of their pairs then."""
    num_pairs: int
    """Number of pairs in use then."""
    num_fitting: int
    """Number of these pairs that fit, the leanest first."""
    is_proven: bool
    """True if this instant proves that no choice fits in this order; False: the search found none."""

    @property
    def helps(self) -> tuple[str, ...]:
        """Remedies, a sentence each."""
        if self.base_bytes > self.limit_bytes:
            over = (self.base_bytes - self.limit_bytes) / _GB
            return (
                f"weights, gradients and optimizer's state alone are {self.base_bytes / _GB:.3g} GB, {over:.3g} GB "
                "over its limit: use more ranks or more tensor parallelism, or train fewer of its layers",
            )
        helps = [f"a limit of {(self.limit_bytes + self.short_bytes) / _GB:.4g} GB"]
        if self.num_pairs > 1:
            helps.append(
                f"an order with at most {self.num_fitting} pieces of layers in flight there, where it has "
                f"{self.num_pairs} of microbatches {', '.join(map(str, self.microbatches))}"
            )
        if self.held_bytes:
            helps.append(
                f"smaller microbatches, of which {self.held_bytes / _GB:.3g} GB are in use there then; or more ranks"
            )
        return tuple(helps)

    def __str__(self) -> str:
        proof = "" if self.is_proven else " in any choice that was found"
        return (
            f"rank {self.rank} is short of {self.short_bytes / _GB:.3g} GB of its {self.limit_bytes / _GB:.3g} GB "
            f"{self.at_ns / 1e6:.3f} ms into the step{proof}; what would help: " + "; or ".join(self.helps)
        )


def shortage_of(
    graph: TaskGraph, start_ns: Sequence[int], ranks: dict[int, RankPairs], pairs: Sequence[Pair]
) -> MemoryShortage | None:
    """Returns the shortage with the leanest candidate of each pair; None if all fits.

    Args:
        graph: The graph with the leanest candidates.
        start_ns: Starts of its tasks.
        ranks: Pairs of each rank with a limit.
        pairs: All pairs.
    """
    worst = None
    for rank, line in enumerate(rank_timelines(graph, start_ns)):
        if rank in ranks:
            short = line.peak_bytes - ranks[rank].limit_bytes
            if short > 0 and (worst is None or short > worst[0]):
                worst = short, rank, line.peak_ns
    if worst is None:
        return None
    short, rank, at = worst
    own = ranks[rank]
    spans, _ = own.snapshot(graph, start_ns)
    using = []
    for pair, (start, forward_end, backward_start, end) in zip(own.pairs, spans, strict=True):
        if start <= at < end:
            candidate = pair.candidates[pair.leanest]
            works = at < forward_end or at >= backward_start
            using.append((candidate.kept_bytes + works * candidate.workspace_bytes, pair, works))
    held = sum(size for size, _, _ in using)
    left, fitting = held - short, 0
    for size in sorted(size for size, _, _ in using):
        left -= size
        fitting += left >= 0
    least = sum(
        min(each.kept_bytes + works * each.workspace_bytes for each in pair.candidates) for _, pair, works in using
    )
    return MemoryShortage(
        rank=rank,
        at_ns=at,
        short_bytes=short,
        limit_bytes=own.limit_bytes,
        base_bytes=own.base_bytes,
        microbatches=tuple(sorted({graph.tasks[pair.forward].microbatch for _, pair, _ in using})),
        held_bytes=held,
        num_pairs=len(using),
        num_fitting=fitting,
        is_proven=held - least < short,
    )
