"""Measurements kept in memory and in a folder: what was measured once is not measured again, and a killed run goes on.

One file holds one module, named by its ``ModuleKey`` and not by its name or its model. A file is replaced as a whole
and under a lock, so processes that profile at the same time lose nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from filelock import FileLock

from mosaic.artifact import fingerprint, load, save
from mosaic.cache_folder import default_cache_folder
from mosaic.device import StrictFile
from mosaic.errors import MosaicError
from mosaic.profile import ModuleMemory, PairSample, Phase, Profile, Sample
from mosaic.profiler.identity import ModuleKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint(StrictFile):
    """One point of a module, and how far it can be trusted."""

    samples: tuple[Sample, ...]
    """Forward and backward. Of a degree above 1, compute alone, without communication."""
    foreign_cpu_share: float | None
    """Share of the machine's CPU time that other processes took meanwhile; None where unknown."""

    @property
    def point(self) -> tuple[int, int]:
        """Degree and quota."""
        return self.samples[0].degree, self.samples[0].quota


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord(StrictFile):
    """Measurements of one module."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: Literal[1] = 1
    key: ModuleKey
    memory: ModuleMemory | None = None
    """Bytes that it keeps."""
    points: tuple[MeasuredPoint, ...] = ()
    """Measured points, each once."""

    def updated(self, newer: ModuleRecord) -> ModuleRecord:
        """Returns both records together; newer measurements take the place of older ones."""
        points = {measured.point: measured for measured in (*self.points, *newer.points)}
        return dataclasses.replace(self, points=tuple(points.values()), memory=newer.memory or self.memory)

    def renamed(self, name: str) -> ModuleRecord:
        """Returns the record under another name of the module."""

        def rename(value: Any) -> Any:
            return value and dataclasses.replace(value, module=name)

        points = (dataclasses.replace(point, samples=tuple(map(rename, point.samples))) for point in self.points)
        return dataclasses.replace(self, memory=rename(self.memory), points=tuple(points))

    def at(self, degree: int, quota: int) -> MeasuredPoint | None:
        return next((measured for measured in self.points if measured.point == (degree, quota)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairKey(StrictFile):
    """Two modules side by side, and the slots of each; a record names the modules ``0`` and ``1``."""

    modules: tuple[ModuleKey, ...]
    quotas: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord(StrictFile):
    """Measurements of two modules side by side, in both phases."""

    SCHEMA_VERSION: ClassVar[int] = 2

    schema_version: Literal[2] = 2
    key: PairKey
    pairs: tuple[PairSample, ...] = ()
    """Each of the two beside the other."""

    def updated(self, newer: PairRecord) -> PairRecord:
        """Returns the newer measurements, if there are any."""
        return newer if newer.pairs else self


Record = TypeVar("Record", ModuleRecord, PairRecord)


class ProfileCache:
    """Measurements in a folder, or of this process alone. Deleting any of the folder's files is safe at any time.

    Args:
        folder: Where; made when the first measurement is kept. None keeps them in memory.
        reuse: Whether to read what is in the folder; without, everything is measured again and kept.
    """

    def __init__(self, folder: Path | None = None, *, reuse: bool = True) -> None:
        self.folder = folder
        self.reuse = reuse
        self._own: dict[ModuleKey | PairKey, Any] = {}
        self._warned = False

    def module(self, key: ModuleKey, name: str) -> ModuleRecord:
        """Returns what is known of a module, under its present name."""
        return self._find(ModuleRecord(key=key)).renamed(name)

    def add_module(self, key: ModuleKey, points: Iterable[MeasuredPoint], memory: ModuleMemory | None) -> None:
        """Keeps measurements of a module; newer ones take the place of older ones."""
        self._add(ModuleRecord(key=key, points=tuple(points), memory=memory))

    def pair(self, key: PairKey, names: Sequence[str]) -> tuple[PairSample, ...]:
        """Returns what is known of two modules side by side, under their present names in the order of the key."""
        return _renamed(self._find(PairRecord(key=key)).pairs, {str(index): name for index, name in enumerate(names)})

    def add_pair(self, key: PairKey, names: Sequence[str], pairs: Sequence[PairSample]) -> None:
        """Keeps measurements of two modules side by side, in the place of older ones."""
        self._add(_pair_record(key, names, pairs))

    def learn(self, profile: Profile, keys: Mapping[str, ModuleKey]) -> None:
        """Takes the measurements of a user's profile into memory, under the keys of its modules; the folder gets none.

        Those of one device alone: times at higher degrees have communication in them.
        """
        memory = {entry.module: entry for entry in profile.memory}
        share = profile.environment.foreign_cpu_share
        for name, key in keys.items():
            forwards, backwards = (profile.samples_of(name, phase) for phase in Phase)
            points = tuple(
                MeasuredPoint(samples=(forward, backward), foreign_cpu_share=share)
                for forward, backward in itertools.product(forwards, backwards)
                if forward.quota == backward.quota
            )
            self._keep(ModuleRecord(key=key, points=points, memory=memory.get(name)))
        by_key: dict[tuple[str, ...], dict[tuple[int, ...], list[PairSample]]] = {}
        order = list(keys)
        for sample in profile.pairs:
            if sample.module in keys and sample.beside in keys:
                sides = sorted(
                    ((sample.module, sample.quota), (sample.beside, sample.beside_quota)),
                    key=lambda side: order.index(side[0]),
                )
                names, quotas = zip(*sides, strict=True)
                by_key.setdefault(names, {}).setdefault(quotas, []).append(sample)
        for names, by_quotas in by_key.items():
            for quotas, pairs in by_quotas.items():
                self._keep(
                    _pair_record(PairKey(modules=tuple(map(keys.__getitem__, names)), quotas=quotas), names, pairs)
                )

    def _find(self, empty: Record) -> Record:
        stored = self._read(empty) if self.reuse else empty
        own: Record | None = self._own.get(empty.key)
        return stored if own is None else stored.updated(own)

    def _keep(self, record: Record) -> None:
        own: Record | None = self._own.get(record.key)
        self._own[record.key] = record if own is None else own.updated(record)

    def _add(self, record: Record) -> None:
        if self.folder is None or not self.reuse:  # else it is read from the folder, where others may renew it
            self._keep(record)
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock"):
                save(self._read(type(record)(key=record.key)).updated(record), self._path(record))
        except (OSError, NotImplementedError, MosaicError) as error:  # no lock on this file system, too
            if not self._warned:  # a profile is worth having without a cache
                warnings.warn(f"measurements are not kept: {error}", stacklevel=4)
            self._warned = True

    def _path(self, record: Record) -> Path:
        assert self.folder is not None
        kind = "module" if isinstance(record, ModuleRecord) else "pair"
        return self.folder / f"{kind}-{record.SCHEMA_VERSION}-{fingerprint(record.key)}.json"

    def _read(self, empty: Record) -> Record:
        if self.folder is None or not (path := self._path(empty)).exists():
            return empty
        try:
            record = load(type(empty), path)
        except MosaicError as error:
            warnings.warn(f"{error}; what it held is measured again", stacklevel=5)
            return empty
        return record if record.key == empty.key else empty


def open_cache(where: ProfileCache | str | Path | None) -> ProfileCache:
    """Returns the cache of a handle: over the folder of a cache that is passed, over a folder, over the user's own
    (``"user"``), or in memory.

    A user without a home folder has none, which is a warning.
    """
    if isinstance(where, ProfileCache):
        return ProfileCache(where.folder, reuse=where.reuse)
    if where != "user":
        return ProfileCache(None if where is None else Path(where))
    try:
        return ProfileCache(default_cache_folder())
    except RuntimeError as error:  # what pathlib raises
        warnings.warn(f"measurements are not kept: {error}; set XDG_CACHE_HOME or give cache", stacklevel=3)
        return ProfileCache()


def _pair_record(key: PairKey, names: Sequence[str], pairs: Iterable[PairSample]) -> PairRecord:
    return PairRecord(key=key, pairs=_renamed(pairs, {name: str(index) for index, name in enumerate(names)}))


def _renamed(pairs: Iterable[PairSample], names: Mapping[str, str]) -> tuple[PairSample, ...]:
    return tuple(dataclasses.replace(pair, module=names[pair.module], beside=names[pair.beside]) for pair in pairs)
