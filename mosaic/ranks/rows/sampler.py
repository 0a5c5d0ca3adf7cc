"""Loading each row on the rank that needs it: shares of a global batch with which the fewest bytes travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import combinations

import torch
from torch.utils.data import Sampler

from mosaic.ranks.rows.routing import RowRouting

_MAX_CHOICES = 4096
"""Ways to share rows that are looked at; there are 2 to the power of the number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """A module's way through a step, as far as the loader can change it."""

    members: tuple[int, ...]
    """Ranks that run it."""
    step_bytes: float
    """Bytes of its arguments and results in the sample's step, and of their gradients."""


def rows_to_load(num_rows: int, num_ranks: int, feeds: Iterable[Feed], *, least: int = 1) -> tuple[int, ...]:
    """Returns how many rows of a global batch each rank loads, at least ``least``, so that the fewest bytes travel.

    Shares are as equal as can be over a subset of the ranks; of those that send as few bytes, the most even counts.

    Raises:
        ValueError: There are fewer rows than each rank has to load.
    """
    if num_rows < max(1, least * num_ranks):
        raise ValueError(f"num_rows={num_rows}; a global batch of {num_ranks} ranks needs {least} or more for each")
    feeds = tuple(feeds)
    everyone = tuple(range(num_ranks))
    if 2**num_ranks <= _MAX_CHOICES:
        chosen = [ranks for count in range(1, num_ranks + 1) for ranks in combinations(everyone, count)]
    else:
        chosen = sorted({feed.members for feed in feeds} | {everyone})

    def moved(held: tuple[int, ...]) -> float:
        return sum(feed.step_bytes * RowRouting(held=held, members=feed.members).num_moved for feed in feeds)

    def share(ranks: tuple[int, ...]) -> tuple[int, ...]:
        each, more = divmod(num_rows - least * num_ranks, len(ranks))
        larger = ranks[:more]
        return tuple(least + (rank in ranks) * each + (rank in larger) for rank in everyone)

    return min(map(share, chosen), key=lambda held: (moved(held), max(held), held))


class RankSampler(Sampler[list[int]]):
    """Yields this rank's rows of each global batch, for ``DataLoader(..., batch_sampler=sampler)``.

    All ranks draw the same order, from the seed and the epoch, and cut each global batch in the same places: every
    sample comes once an epoch, on one rank. A rank with a share of 0 has empty lists, which torch's own ``collate_fn``
    cannot make a batch of; so may any rank at the end without ``drop_last``.

    Ranks' losses count alike, however many rows they are means of, as under DistributedDataParallel. For the mean
    over the global batch, a rank multiplies its own with ``weight``.

    Args:
        data: The data set, or how many samples it has, or a sampler of indices that is the same on all ranks.
        shares: Rows of a global batch that each rank loads; a batch has as many as these together.
        rank: This one.
        shuffle: Whether to draw another order each epoch; of no use with a sampler.
        seed: Of the order.
        drop_last: Whether to leave out samples that make no whole batch; else they are cut in proportion.

    Raises:
        ValueError: No rank loads anything, or there is no such rank.
    """

    def __init__(
        self,
        data: Sized | int | Sampler[int],
        shares: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        if sum(shares) < 1 or min(shares) < 0:
            raise ValueError(f"shares={tuple(shares)}; a rank loads 0 rows or more, and some rank loads one")
        if not 0 <= rank < len(shares):
            raise ValueError(f"rank={rank}; there are shares for ranks 0 to {len(shares) - 1}")
        self.shares = tuple(shares)
        self.rank = rank
        self._order = data if isinstance(data, Sampler) else None
        self._size = data if isinstance(data, int) else len(data)  # type: ignore[arg-type]  # some samplers have none
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0
        self._start = 0

    @property
    def weight(self) -> float:
        """The factor that makes this rank's mean its part of the mean over all rows: 1 for equal shares."""
        return self.shares[self.rank] * len(self.shares) / sum(self.shares)

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch, as torch's ``DistributedSampler`` does; it starts at its first batch."""
        self._epoch, self._start = epoch, 0

    def state_dict(self, num_batches: int) -> dict[str, int]:
        """Returns the state after so many batches of this epoch; a loader reads ahead, so the loop has to count."""
        return {"epoch": self._epoch, "num_batches": num_batches, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues where another sampler was, also with other shares of as large a global batch."""
        self._epoch, self._start, self._seed = state["epoch"], state["num_batches"], state["seed"]

    def __len__(self) -> int:
        whole, rest = divmod(self._size, sum(self.shares))
        return max(0, whole + (rest > 0 and not self._drop_last) - self._start)

    def __iter__(self) -> Iterator[list[int]]:
        order, batch = self._indices(), sum(self.shares)
        for begin in range(self._start * batch, len(order), batch):
            rows = order[begin : begin + batch]
            if len(rows) < batch and self._drop_last:
                break
            held = self.shares if len(rows) == batch else _in_proportion(len(rows), self.shares)
            first = sum(held[: self.rank])
            yield rows[first : first + held[self.rank]]
        self._start = 0

    def _indices(self) -> list[int]:
        if self._order is not None:
            return list(self._order)
        if not self._shuffle:
            return list(range(self._size))
        # Of a generator of its own: what ranks draw from the default one differs with the modules that they run.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order: list[int] = torch.randperm(self._size, generator=generator).tolist()
        return order


def _in_proportion(num_rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Cuts fewer rows than a batch has, by the largest remainders."""
    total = sum(shares)
    held = [num_rows * share // total for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda rank: (-(num_rows * shares[rank] % total), rank))
    for rank in by_rest[: num_rows - sum(held)]:
        held[rank] += 1
    return tuple(held)
