"""Scores of versions, row by row, for the gate and ``scores.json``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mosaic.errors import MosaicError

RowSet = Literal["frozen", "fresh"]
"""Rows that stay for many days, or rows held out of the day's new data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of one version on one set of rows, in row order."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    version: str
    """Name of the version, such as ``0042``."""
    rows: RowSet
    """The set."""
    row_digest: str
    """Digest of the list of rows; see ``digest_of_rows``."""
    value: tuple[float | None, ...]
    """One per row, larger is better; None if it was not finite."""
    cluster: tuple[str, ...] = ()
    """One per row: rows of one recording, robot or shop are resampled together. Empty: each row is its own cluster."""
    columns: dict[str, tuple[str, ...]]
    """Further columns by name, such as ``label``, ``modality``, ``site``; of frozen rows also ``added``, a date."""

    def __post_init__(self) -> None:
        """Checks that the columns are of one length.

        Raises:
            ValueError: Their lengths differ.
        """
        for name, column in {"cluster": self.cluster or self.value, **self.columns}.items():
            if len(column) != len(self.value):
                raise ValueError(
                    f"scores of version {self.version}: column {name!r} has {len(column)} entries for "
                    f"{len(self.value)} rows; score() has to return one entry a row"
                )

    @staticmethod
    def of(version: str, rows: RowSet, row_digest: str, columns: Mapping[str, Any]) -> Scores:
        """Returns scores from the columns of ``score(model, batch)``, joined over batches.

        Columns may be lists, arrays, or tensors on the host; values become floats, all else text.

        Raises:
            ValueError: There is no column ``value``, or columns differ in length.
        """
        lists = {name: column.tolist() if hasattr(column, "tolist") else column for name, column in columns.items()}
        if "value" not in lists:
            raise ValueError(f"score() returned {sorted(lists)}; it has to return a column 'value', larger is better")
        return Scores(
            version=version,
            rows=rows,
            row_digest=row_digest,
            value=tuple(_finite(value) for value in lists.pop("value")),
            cluster=tuple(map(str, lists.pop("cluster", ()))),
            columns={name: tuple(map(str, column)) for name, column in lists.items()},
        )

    @property
    def array(self) -> NDArray[np.float64]:
        """The values, with NaN for None."""
        return np.array(self.value, dtype=np.float64)

    @property
    def num_invalid(self) -> int:
        """Number of rows without a finite value."""
        return sum(value is None for value in self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DayScores:
    """``scores.json``: the scores that a day's gate compares."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    scores: tuple[Scores, ...]
    """Scores of the challenger, the champion and the anchor, on frozen and on fresh rows."""

    def find(self, version: str | None, rows: RowSet) -> Scores | None:
        """Returns the scores of a version on a set; None if they are missing or empty."""
        return next(
            (each for each in self.scores if (each.version, each.rows) == (version, rows) and each.value),
            None,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """The values of two versions on the same rows."""

    challenger: str
    """The judged version."""
    against: str
    """The compared version."""
    old: NDArray[np.float64]
    """Values of ``against``."""
    new: NDArray[np.float64]
    """Values of the challenger."""
    cluster: NDArray[np.int64]
    """Number of each row's group."""
    columns: Mapping[str, NDArray[np.str_]]
    """Further columns by name."""

    def only(self, selection: NDArray[np.bool_]) -> Pair:
        """Returns the pair on the selected rows."""
        return Pair(
            challenger=self.challenger,
            against=self.against,
            old=self.old[selection],
            new=self.new[selection],
            cluster=self.cluster[selection],
            columns={name: column[selection] for name, column in self.columns.items()},
        )


def paired(new: Scores, old: Scores) -> Pair:
    """Returns the rows on which both versions have a value.

    A challenger with a value that is not finite is invalid earlier. A row without a finite value of the compared
    version is left out.

    Raises:
        MosaicError: The versions were scored on different rows, or the rows' groups or columns differ.
    """
    for what, left, right in (
        ("rows", new.row_digest, old.row_digest),
        ("number of rows", len(new.value), len(old.value)),
        ("clusters", new.cluster, old.cluster),
        ("columns", new.columns, old.columns),
    ):
        if left != right:
            shown = f" ({left} and {right})" if isinstance(left, str | int) else ""
            raise MosaicError(
                f"versions {new.version} and {old.version} were scored on {new.rows} sets whose {what} differ{shown}; "
                "score both again on the same rows"
            )
    pair = Pair(
        challenger=new.version,
        against=old.version,
        old=old.array,
        new=new.array,
        cluster=np.unique(new.cluster, return_inverse=True)[1] if new.cluster else np.arange(len(new.value)),
        columns={name: np.array(column, dtype=np.str_) for name, column in new.columns.items()},
    )
    return pair.only(np.isfinite(pair.old) & np.isfinite(pair.new))


def digest_of_rows(rows: Iterable[str]) -> str:
    """Returns a digest of 16 hexadecimal digits of a list of row names or digests."""
    digest = hashlib.sha256()
    for row in rows:
        encoded = row.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:16]


def joined(batches: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Joins the results of ``score(model, batch)`` over batches, column by column.

    Raises:
        ValueError: Batches differ in columns, or the columns of a batch differ in length.
    """
    columns: dict[str, list[Any]] = {}
    for number, batch in enumerate(batches):
        lists: dict[str, Sequence[Any]] = {
            name: column.tolist() if hasattr(column, "tolist") else column for name, column in batch.items()
        }
        if number and lists.keys() != columns.keys():
            raise ValueError(
                f"score() returned {sorted(lists)} for batch {number} and {sorted(columns)} before; "
                "return the same columns for every batch"
            )
        if len({len(column) for column in lists.values()}) > 1:
            lengths = ", ".join(f"{name} {len(column)}" for name, column in lists.items())
            raise ValueError(f"score() returned columns of other lengths ({lengths}); return one entry a row")
        for name, column in lists.items():
            columns.setdefault(name, []).extend(column)
    return columns


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
