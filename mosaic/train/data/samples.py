"""The data of a day as one data set by position, and its unreadable rows."""

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
"""Rows of the same source that replace an unreadable row, at most."""
MIN_JUDGED = 1000
"""Least number of samples that the share of rejected rows is computed over."""
_MAX_DETAIL = 300
"""Most characters of an error's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """An unreadable row; another row of the same source took its position."""

    position: int
    source: str
    """Name of the source."""
    row: int
    reason: str
    """Kind of the error; rejected rows are counted by it."""
    detail: str
    """Message of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    samples: list[Any]
    rejects: tuple[Reject, ...]
    """Unreadable rows that were replaced."""


class Samples(Dataset[Any]):
    """Samples of users' data sets by position; the seed and the position seed each one.

    Raises:
        MosaicError: A data set has not as many rows as its frozen source.
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
        return self.__getitems__([position]).samples[0]

    def __getitems__(self, positions: Sequence[int]) -> Drawn:
        """Returns the samples of a micro-batch; torch's loader calls it."""
        spans = [positions] if isinstance(positions, range) else [range(start, start + 1) for start in positions]
        draws = [self.stream.span(span.start, span.stop) for span in spans]
        sources = [source for draw in draws for source in draw.sources.tolist()]
        rows = [row for draw in draws for row in draw.rows.tolist()]
        words = sample_words(self.stream.seed, positions).tolist()
        samples: list[Any] = []
        rejects: list[Reject] = []
        generators = {id(own): own for source in set(sources) for own in self._generators[source]}
        with put_back(tuple(generators.values())):
            for position, source, row, seeds in zip(positions, sources, rows, words, strict=True):
                try:
                    seed_sample(seeds, self._generators[source])
                    samples.append(self.datasets[source][row])
                except Exception as error:  # of any kind, from the user's data set: another row takes its place
                    samples.append(self._read_another(position, source, row, seeds, rejects, error))
        return Drawn(samples=samples, rejects=tuple(rejects))

    def _read_another(
        self, position: int, source: int, row: int, words: list[int], rejects: list[Reject], error: Exception
    ) -> Any:
        """Retries the row once after an ``OSError``; then tries other rows."""
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
            f"{type(error).__name__}: {str(error)[:_MAX_DETAIL]}. Check that source, or remove it from the day"
        ) from error


def is_iterable(data: Any) -> bool:
    """Returns True for a data set without length or index access."""
    return not (hasattr(data, "__getitem__") and isinstance(data, Sized))


class RejectCount:
    """Unreadable rows so far, by source and reason; ``limit`` is the share of samples beyond which ``add`` raises."""

    def __init__(self, limit: float = 0.01) -> None:
        self.limit = limit
        self.samples = 0
        self._counts: Counter[tuple[str, str]] = Counter()

    @property
    def by_source(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for (source, reason), count in sorted(self._counts.items()):
            counts.setdefault(source, {})[reason] = count
        return counts

    def add(self, rejects: Sequence[Reject], samples: int) -> None:
        """Counts the rejects of a step; raises MosaicError if there are more than the limit allows."""
        self.samples += samples
        self._counts.update((reject.source, reject.reason) for reject in rejects)
        total, judged = self._counts.total(), max(self.samples, MIN_JUDGED)
        if rejects and total > self.limit * judged:
            last = rejects[-1]
            raise MosaicError(
                f"{total} of {self.samples} samples drew a row that is unreadable, more than "
                f"{self.limit:.3g} of {judged}: {self.by_source}; the last is row {last.row} of {last.source!r}: "
                f"{last.reason}: {last.detail}. Mend or remove such rows, or allow more of them"
            )

    def resume(self, samples: int, by_source: Mapping[str, Mapping[str, int]]) -> None:
        self.samples = samples
        rejects = by_source.items()
        self._counts = Counter({(source, reason): n for source, kinds in rejects for reason, n in kinds.items()})
