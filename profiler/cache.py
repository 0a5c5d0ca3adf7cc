"""Measurements kept in memory and in a folder: nothing is measured twice, and a killed run goes on.

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
from typing import Any, ClassVar, Literal

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
class MeasuredPair(StrictFile):
    """One phase of a module beside another."""

    beside: ModuleKey
    sample: PairSample

    @property
    def point(self) -> tuple[ModuleKey, Phase, int, int]:
        """The other module, the phase and both quotas."""
        return self.beside, self.sample.phase, self.sample.quota, self.sample.beside_quota


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord(StrictFile):
    """Measurements of one module, alone and beside others; each point once."""

    SCHEMA_VERSION: ClassVar[int] = 2

    schema_version: Literal[2] = 2
    key: ModuleKey
    memory: ModuleMemory | None = None
    """Bytes that it keeps."""
    points: tuple[MeasuredPoint, ...] = ()
    pairs: tuple[MeasuredPair, ...] = ()

    def updated(self, newer: ModuleRecord) -> ModuleRecord:
        """Returns both records together; newer measurements take the place of older ones."""
        points = {measured.point: measured for measured in (*self.points, *newer.points)}
        pairs = {measured.point: measured for measured in (*self.pairs, *newer.pairs)}
        memory = newer.memory or self.memory
        return dataclasses.replace(self, points=tuple(points.values()), pairs=tuple(pairs.values()), memory=memory)

    def at(self, degree: int, quota: int) -> MeasuredPoint | None:
        return next((measured for measured in self.points if measured.point == (degree, quota)), None)


class ProfileCache:
    """Measurements in a folder, or of this process alone. Deleting any of the folder's files is safe at any time.

    Args:
        folder: Where; made when the first measurement is kept. None keeps them in memory.
        reuse: Whether to read what is in the folder; without, everything is measured again and kept.
    """

    def __init__(self, folder: Path | None = None, *, reuse: bool = True) -> None:
        self.folder = folder
        self.reuse = reuse
        self._own: dict[ModuleKey, ModuleRecord] = {}
        self._warned = False

    def module(self, key: ModuleKey, name: str) -> ModuleRecord:
        """Returns the measurements of a module, under its present name."""

        def rename(value: Any) -> Any:
            return value and dataclasses.replace(value, module=name)

        record = self._find(key)
        points = [dataclasses.replace(point, samples=tuple(map(rename, point.samples))) for point in record.points]
        return dataclasses.replace(record, memory=rename(record.memory), points=tuple(points))

    def pair(self, keys: Mapping[str, ModuleKey], quotas: Mapping[str, int]) -> tuple[PairSample, ...]:
        """Returns the measurements of two modules side by side, under their present names; none of one side alone."""
        sides = [
            [
                dataclasses.replace(measured.sample, module=name, beside=other)
                for measured in self._find(keys[name]).pairs
                if (measured.beside, *measured.point[2:]) == (keys[other], quotas[name], quotas[other])
            ]
            for name, other in itertools.permutations(quotas, 2)
        ]
        return tuple(itertools.chain(*sides)) if all(sides) else ()

    def add_module(self, key: ModuleKey, points: Iterable[MeasuredPoint], memory: ModuleMemory | None) -> None:
        """Keeps measurements of a module; newer ones take the place of older ones."""
        self._add(ModuleRecord(key=key, points=tuple(points), memory=memory))

    def add_pairs(self, keys: Mapping[str, ModuleKey], pairs: Sequence[PairSample]) -> None:
        """Keeps measurements of modules side by side."""
        for name in dict.fromkeys(pair.module for pair in pairs):
            self._add(ModuleRecord(key=keys[name], pairs=_pairs_of(name, pairs, keys)))

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
            pairs = _pairs_of(name, [pair for pair in profile.pairs if pair.beside in keys], keys)
            self._keep(ModuleRecord(key=key, points=points, memory=memory.get(name), pairs=pairs))

    def _find(self, key: ModuleKey) -> ModuleRecord:
        stored = self._read(key) if self.reuse else ModuleRecord(key=key)
        return stored.updated(self._own[key]) if key in self._own else stored

    def _keep(self, record: ModuleRecord) -> None:
        self._own[record.key] = self._own.get(record.key, ModuleRecord(key=record.key)).updated(record)

    def _add(self, record: ModuleRecord) -> None:
        if self.folder is None or not self.reuse:  # else it is read from the folder, where others may renew it
            self._keep(record)
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock"):
                save(self._read(record.key).updated(record), self._path(record.key))
        except (OSError, NotImplementedError, MosaicError) as error:  # no lock on this file system, too
            if not self._warned:  # a profile is worth having without a cache
                warnings.warn(f"measurements are not kept: {error}", stacklevel=4)
            self._warned = True

    def _path(self, key: ModuleKey) -> Path:
        assert self.folder is not None
        return self.folder / f"module-{ModuleRecord.SCHEMA_VERSION}-{fingerprint(key)}.json"

    def _read(self, key: ModuleKey) -> ModuleRecord:
        if self.folder is not None and (path := self._path(key)).exists():
            try:
                record = load(ModuleRecord, path)
            except MosaicError as error:
                warnings.warn(f"{error}; what it held is measured again", stacklevel=5)
            else:
                if record.key == key:
                    return record
        return ModuleRecord(key=key)


def _pairs_of(name: str, pairs: Iterable[PairSample], keys: Mapping[str, ModuleKey]) -> tuple[MeasuredPair, ...]:
    return tuple(MeasuredPair(beside=keys[pair.beside], sample=pair) for pair in pairs if pair.module == name)


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
