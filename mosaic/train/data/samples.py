"""The data of a day as one data set that is asked for positions, and rows of it that cannot be read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from mosaic.errors import MosaicError
from mosaic.train.data.positions import PositionStream
from mosaic.train.data.seeds import generators_of, put_back, sample_words, seed_sample

MAX_ATTEMPTS = 16
"""After a position's own row could not be read: rows of its source that are tried in its place."""
MIN_JUDGED = 1000
"""Samples before which the share of rejected rows is taken as if there had been so many."""
_MAX_DETAIL = 300
"""Characters of an error's message that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A row that could not be read; its position took another row of the same source."""

    position: int
    """That drew it."""
    source: str
    """Its name."""
    row: int
    """Of that source."""
    reason: str
    """Kind of the error, by which rejected rows are counted."""
    detail: str
    """What the error said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Samples of consecutive positions."""

    samples: list[Any]
    """One for each position."""
    rejects: tuple[Reject, ...]
    """Rows that other rows took the place of."""


class Samples(Dataset[Any]):
    """What users' data sets give at each position, drawn under the seed and that position.

    Args:
        datasets: Of each source of the stream, map-style. They are asked one row at a time.
        stream: Which row stands at which position.

    Raises:
        MosaicError: A data set has not as many rows as its source was frozen with.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], stream: PositionStream) -> None:
        self.datasets = tuple(datasets)
        self.stream = stream
        for source, dataset in zip(stream.sources, self.datasets, strict=True):
            rows = len(dataset) if isinstance(dataset, Sized) else None
            if rows != source.rows:
                raise MosaicError(
                    f"{source.name!r} has {rows} rows now and had {source.rows} when it was frozen; put it back as it "
                    "was, or begin the day anew. Rows that arrive later belong to the next day"
                )
        self._generators = tuple(generators_of(dataset) for dataset in self.datasets)

    def __getitem__(self, position: int) -> Any:
        """Returns one sample."""
        return self.__getitems__([position]).samples[0]

    def __getitems__(self, positions: Sequence[int]) -> Drawn:
        """Returns the samples of some positions; torch's loader calls it for a whole micro-batch.

        Raises:
            MosaicError: No row that a position tried can be read.
        """
        spans = [positions] if isinstance(positions, range) else [range(one, one + 1) for one in positions]
        draws = [self.stream.span(span.start, span.stop) for span in spans]
        sources = [source for draw in draws for source in draw.sources.tolist()]
        rows = [row for draw in draws for row in draw.rows.tolist()]
        words = sample_words(self.stream.seed, positions).tolist()
        samples: list[Any] = []
        rejects: list[Reject] = []
        with put_back(tuple({id(one): one for source in set(sources) for one in self._generators[source]}.values())):
            for position, source, row, own in zip(positions, sources, rows, words, strict=True):
                try:
                    seed_sample(own, self._generators[source])
                    samples.append(self.datasets[source][row])
                except Exception as error:  # of any kind, from the user's data set: another row takes its place
                    samples.append(self._read_another(position, source, row, own, rejects, error))
        return Drawn(samples=samples, rejects=tuple(rejects))

    def _read_another(
        self, position: int, source: int, row: int, words: list[int], rejects: list[Reject], error: Exception
    ) -> Any:
        """Reads the row again, if a disk or network failed that may answer at the second time; then other rows."""
        name, rows = self.stream.sources[source].name, self.stream.sources[source].rows
        others = random.Random(words[3])
        again = isinstance(error, OSError)
        for _ in range(MAX_ATTEMPTS):
            if isinstance(error, MemoryError | MosaicError):
                raise error
            if not again:
                kind, detail = type(error).__name__, str(error)[:_MAX_DETAIL]
                rejects.append(Reject(position=position, source=name, row=row, reason=kind, detail=detail))
                row = others.randrange(rows)
            try:
                seed_sample(words, self._generators[source])
                return self.datasets[source][row]
            except Exception as next_error:  # the same; each is counted, and too many are an error
                again = isinstance(next_error, OSError) and not again
                error = next_error
        raise MosaicError(
            f"position {position} read no row of {name!r} in {MAX_ATTEMPTS + 1} attempts, the last of them row {row}: "
            f"{type(error).__name__}: {str(error)[:_MAX_DETAIL]}. Look at that source, or take it out of the day"
        ) from error


def is_iterable(data: Any) -> bool:
    """Whether a data set can only be gone through: it has no length, or cannot be indexed."""
    return not (hasattr(data, "__getitem__") and isinstance(data, Sized))


class RejectCount:
    """Rows that could not be read so far, by source and reason.

    Args:
        limit: Share of samples, beyond which ``add`` raises.
    """

    def __init__(self, limit: float = 0.01) -> None:
        self.limit = limit
        self.samples = 0
        self._counts: Counter[tuple[str, str]] = Counter()

    @property
    def by_source(self) -> dict[str, dict[str, int]]:
        """How many, by the source's name and the kind of error."""
        found: dict[str, dict[str, int]] = {}
        for (source, reason), count in sorted(self._counts.items()):
            found.setdefault(source, {})[reason] = count
        return found

    def add(self, rejects: Sequence[Reject], samples: int) -> None:
        """Counts what a step had.

        Args:
            rejects: Rows that could not be read.
            samples: How many were drawn.

        Raises:
            MosaicError: There are more than the limit allows.
        """
        self.samples += samples
        self._counts.update((reject.source, reject.reason) for reject in rejects)
        total, judged = self._counts.total(), max(self.samples, MIN_JUDGED)
        if rejects and total > self.limit * judged:
            last = rejects[-1]
            raise MosaicError(
                f"{total} of {self.samples} samples drew a row that cannot be read, more than "
                f"{self.limit:.3g} of {judged}: {self.by_source}; the last is row {last.row} of {last.source!r}: "
                f"{last.reason}: {last.detail}. Mend or remove such rows, or allow more of them"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts, as JSON has them."""
        return {"samples": self.samples, "rejects": self.by_source}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from counts that ``state_dict`` returned."""
        self.samples = state["samples"]
        rejects = state["rejects"].items()
        self._counts = Counter({(source, reason): n for source, kinds in rejects for reason, n in kinds.items()})
