"""How versions did on sets of rows, row by row: what the gate compares, and ``scores.json``."""

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
"""Rows that stay the same for many days, or rows held out of the day's new data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What one version scored on one set of rows, in the order of the rows."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    version: str
    """Which was scored, such as ``0042``."""
    rows: RowSet
    """The set."""
    row_digest: str
    """Names the list of rows; see ``digest_of_rows``."""
    value: tuple[float | None, ...]
    """One a row, larger is better; None where it was not a finite number."""
    cluster: tuple[str, ...] = ()
    """One a row: rows of one recording, robot or shop are resampled together. Empty: each row is one of its own."""
    columns: dict[str, tuple[str, ...]]
    """Further columns by name, such as ``label``, ``modality``, ``site``; of frozen rows also ``added``, a date."""

    def __post_init__(self) -> None:
        """Checks that the columns are of one length.

        Raises:
            ValueError: They are not.
        """
        for name, column in {"cluster": self.cluster or self.value, **self.columns}.items():
            if len(column) != len(self.value):
                raise ValueError(
                    f"scores of version {self.version}: column {name!r} has {len(column)} entries for "
                    f"{len(self.value)} rows; score() has to return one entry a row"
                )

    @staticmethod
    def of(version: str, rows: RowSet, row_digest: str, columns: Mapping[str, Any]) -> Scores:
        """Returns scores from the columns that ``score(model, batch)`` gave, joined over its batches.

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
        """The values, NaN where there is none."""
        return np.array(self.value, dtype=np.float64)

    @property
    def num_invalid(self) -> int:
        """Rows whose value was not a finite number."""
        return sum(value is None for value in self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DayScores:
    """``scores.json``: all that a day's gate compares."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    scores: tuple[Scores, ...]
    """Of the challenger, the champion and the anchor, on frozen and on fresh rows."""

    def find(self, version: str | None, rows: RowSet) -> Scores | None:
        """Returns what a version scored on a set; None where there is nothing, or no row."""
        return next((one for one in self.scores if (one.version, one.rows) == (version, rows) and one.value), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """The values of two versions on the same rows."""

    challenger: str
    """The version that is judged."""
    against: str
    """The version that it is compared with."""
    old: NDArray[np.float64]
    """Values of ``against``."""
    new: NDArray[np.float64]
    """Values of the challenger."""
    cluster: NDArray[np.int64]
    """Number of each row's group."""
    columns: Mapping[str, NDArray[np.str_]]
    """Further columns by name."""

    def only(self, chosen: NDArray[np.bool_]) -> Pair:
        """Returns some of the rows."""
        return Pair(
            challenger=self.challenger,
            against=self.against,
            old=self.old[chosen],
            new=self.new[chosen],
            cluster=self.cluster[chosen],
            columns={name: column[chosen] for name, column in self.columns.items()},
        )


def paired(new: Scores, old: Scores) -> Pair:
    """Returns the rows on which both have a value.

    A challenger with a row that is not finite is invalid before it comes to this; where the version compared with has
    no finite value, the row is left out.

    Raises:
        MosaicError: They were scored on other rows, or the rows' groups or columns differ.
    """
    for what, one, other in (
        ("rows", new.row_digest, old.row_digest),
        ("number of rows", len(new.value), len(old.value)),
        ("clusters", new.cluster, old.cluster),
        ("columns", new.columns, old.columns),
    ):
        if one != other:
            shown = f" ({one} and {other})" if isinstance(one, str | int) else ""
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
    """Returns 16 hexadecimal digits that name a list of rows: their own names or digests, in order."""
    digest = hashlib.sha256()
    for row in rows:
        encoded = row.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:16]


def joined(batches: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Joins what ``score(model, batch)`` returned for each batch, column by column.

    Raises:
        ValueError: Batches have other columns, or the columns of one differ in length.
    """
    found: dict[str, list[Any]] = {}
    for number, batch in enumerate(batches):
        lists: dict[str, Sequence[Any]] = {
            name: column.tolist() if hasattr(column, "tolist") else column for name, column in batch.items()
        }
        if number and lists.keys() != found.keys():
            raise ValueError(
                f"score() returned {sorted(lists)} for batch {number} and {sorted(found)} before; "
                "return the same columns for every batch"
            )
        if len({len(column) for column in lists.values()}) > 1:
            lengths = ", ".join(f"{name} {len(column)}" for name, column in lists.items())
            raise ValueError(f"score() returned columns of other lengths ({lengths}); return one entry a row")
        for name, column in lists.items():
            found.setdefault(name, []).extend(column)
    return found


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
