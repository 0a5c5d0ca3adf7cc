"""Measurements kept in a folder: what was measured once is not measured again, and a killed run goes on where it was.

One file holds one module, found by what it is (``ModuleKey``) and not by its name or its model. A file is replaced as
a whole, and under a lock where the system has one, so processes that profile at the same time lose nothing.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from mosaic.artifact import fingerprint, load, save
from mosaic.cache_folder import default_cache_folder
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.profile import ModuleMemory, PairSample
from mosaic.profiler.records import MeasuredPoint, ModuleKey, ModuleRecord, PairKey, PairRecord

Record = TypeVar("Record", ModuleRecord, PairRecord)


class KeepsMeasurements(Protocol):
    """Where measurements are looked up and kept."""

    def module(self, key: ModuleKey, name: str) -> ModuleRecord:
        """Returns what is known of a module, under its present name."""

    def add_module(self, key: ModuleKey, points: Iterable[MeasuredPoint], memory: ModuleMemory | None) -> None:
        """Keeps measurements of a module; newer ones take the place of older ones."""

    def pair(self, key: PairKey, names: Sequence[str]) -> tuple[PairSample, ...]:
        """Returns what is known of two modules side by side, under their present names in the order of the key."""

    def add_pair(self, key: PairKey, names: Sequence[str], pairs: Sequence[PairSample]) -> None:
        """Keeps measurements of two modules side by side, in the place of older ones."""


class ProfileCache:
    """A folder of measurements. It only ever grows; deleting any of its files is safe at any time.

    Args:
        folder: Where; made when the first measurement is kept.
        reuse: Whether to read what is there; without, everything is measured again and kept.
    """

    def __init__(self, folder: Path, *, reuse: bool = True) -> None:
        self.folder = folder
        self._reuse = reuse
        self._warned = False

    def module(self, key: ModuleKey, name: str) -> ModuleRecord:
        """Returns what is known of a module, under its present name."""
        empty = ModuleRecord(key=key)
        return self._read(ModuleRecord, empty, self._path(key)).renamed(name) if self._reuse else empty

    def add_module(self, key: ModuleKey, points: Iterable[MeasuredPoint], memory: ModuleMemory | None) -> None:
        """Keeps measurements of a module; newer ones take the place of older ones."""
        found = tuple(points)
        self._change(ModuleRecord, ModuleRecord(key=key), self._path(key), lambda record: record.merged(found, memory))

    def pair(self, key: PairKey, names: Sequence[str]) -> tuple[PairSample, ...]:
        """Returns what is known of two modules side by side, under their present names in the order of the key."""
        found = self._read(PairRecord, PairRecord(key=key), self._path(key)).pairs if self._reuse else ()
        return renamed_pairs(found, {str(index): name for index, name in enumerate(names)})

    def add_pair(self, key: PairKey, names: Sequence[str], pairs: Sequence[PairSample]) -> None:
        """Keeps measurements of two modules side by side, in the place of older ones."""
        numbered = renamed_pairs(pairs, {name: str(index) for index, name in enumerate(names)})
        found = PairRecord(key=key, pairs=numbered)
        self._change(PairRecord, found, self._path(key), lambda _: found)

    def _path(self, key: ModuleKey | PairKey) -> Path:
        kind, record = ("module", ModuleRecord) if isinstance(key, ModuleKey) else ("pair", PairRecord)
        return self.folder / f"{kind}-{record.SCHEMA_VERSION}-{fingerprint(key)}.json"

    def _read(self, kind: type[Record], empty: Record, path: Path) -> Record:
        if not path.exists():
            return empty
        try:
            record = load(kind, path)
        except (InvalidFileError, MosaicError) as error:
            warnings.warn(f"{error}; what it held is measured again", stacklevel=5)
            return empty
        return record if record.key == empty.key else empty

    def _change(self, kind: type[Record], empty: Record, path: Path, change: Callable[[Record], Record]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder / ".lock"):
                save(change(self._read(kind, empty, path)), path)
        except (OSError, MosaicError) as error:
            if not self._warned:  # a profile is worth having without a cache
                warnings.warn(f"measurements are not kept: {error}", stacklevel=4)
            self._warned = True


def open_cache(where: ProfileCache | str | Path | None) -> ProfileCache | None:
    """Returns a cache: one that is passed, one in a folder, the user's own (``"user"``), or none.

    A user without a home folder has none, which is a warning.
    """
    if where is None or isinstance(where, ProfileCache):
        return where
    if where != "user":
        return ProfileCache(Path(where))
    try:
        return ProfileCache(default_cache_folder())
    except RuntimeError as error:  # what pathlib raises
        warnings.warn(f"measurements are not kept: {error}; set XDG_CACHE_HOME or give cache", stacklevel=3)
        return None


def renamed_pairs(pairs: Iterable[PairSample], names: Mapping[str, str]) -> tuple[PairSample, ...]:
    """Returns samples of two modules with other names for them."""
    return tuple(dataclasses.replace(pair, module=names[pair.module], beside=names[pair.beside]) for pair in pairs)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes out; where the system has no such lock, whoever writes last wins."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file, also when the process is killed
        yield
