"""Measurements of this process, in memory: a model that is planned again has only what is new measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from mosaic.profile import ModuleMemory, PairSample, Phase, Profile
from mosaic.profiler.cache import KeepsMeasurements, renamed_pairs
from mosaic.profiler.records import MeasuredPoint, ModuleKey, ModuleRecord, PairKey


class SessionCache:
    """Keeps what was measured, whether or not a folder keeps it too; of modules that are gone as well.

    Args:
        folder: Asked for what is not known here, and told of all that is new; None for none.
    """

    def __init__(self, folder: KeepsMeasurements | None = None) -> None:
        self._folder = folder
        self._modules: dict[ModuleKey, ModuleRecord] = {}
        self._pairs: dict[PairKey, tuple[PairSample, ...]] = {}

    def module(self, key: ModuleKey, name: str) -> ModuleRecord:
        """Returns what is known of a module, under its present name."""
        own = self._modules.get(key, ModuleRecord(key=key)).renamed(name)
        if self._folder is None:
            return own
        return self._folder.module(key, name).merged(own.points, own.memory)

    def add_module(self, key: ModuleKey, points: Iterable[MeasuredPoint], memory: ModuleMemory | None) -> None:
        """Keeps measurements of a module; newer ones take the place of older ones."""
        found = tuple(points)
        self._modules[key] = self._modules.get(key, ModuleRecord(key=key)).merged(found, memory)
        if self._folder is not None:
            self._folder.add_module(key, found, memory)

    def pair(self, key: PairKey, names: Sequence[str]) -> tuple[PairSample, ...]:
        """Returns what is known of two modules side by side, under their present names in the order of the key."""
        own = self._pairs.get(key, ())
        if not own and self._folder is not None:
            return self._folder.pair(key, names)
        return renamed_pairs(own, {str(index): name for index, name in enumerate(names)})

    def add_pair(self, key: PairKey, names: Sequence[str], pairs: Sequence[PairSample]) -> None:
        """Keeps measurements of two modules side by side, in the place of older ones."""
        self._pairs[key] = renamed_pairs(pairs, {name: str(index) for index, name in enumerate(names)})
        if self._folder is not None:
            self._folder.add_pair(key, names, pairs)

    def learn(self, profile: Profile, keys: Mapping[str, ModuleKey]) -> None:
        """Takes the measurements of a profile that was given, under the keys of its modules; the folder gets none.

        Those of one device alone: times at higher degrees have communication in them.
        """
        memory = {kept.module: kept for kept in profile.memory}
        for name, key in keys.items():
            forwards, backwards = (profile.samples_of(name, phase) for phase in Phase)
            points = [
                MeasuredPoint(samples=(forward, backward), foreign_cpu_share=profile.environment.foreign_cpu_share)
                for forward, backward in itertools.product(forwards, backwards)
                if forward.quota == backward.quota
            ]
            self._modules[key] = ModuleRecord(key=key).merged(points, memory.get(name))
        for names in itertools.combinations(keys, 2):
            found: dict[tuple[int, int], list[PairSample]] = {}
            for sample in profile.pairs:
                if (sample.module, sample.beside) == names:
                    found.setdefault((sample.quota, sample.beside_quota), []).append(sample)
                elif (sample.beside, sample.module) == names:
                    found.setdefault((sample.beside_quota, sample.quota), []).append(sample)
            modules = tuple(keys[name] for name in names)
            for quotas, samples in found.items():
                numbered = renamed_pairs(samples, {name: str(index) for index, name in enumerate(names)})
                self._pairs[PairKey(modules=modules, quotas=quotas)] = numbered
