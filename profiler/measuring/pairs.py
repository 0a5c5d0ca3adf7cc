"""Modules side by side: pairs that may share a stage."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.profile import PairSample, Phase
from mosaic.profiler.measuring.attempt import attempt
from mosaic.profiler.measuring.beside import measure_pair
from mosaic.profiler.measuring.points import MeasuringSite
from mosaic.profiler.records import ModuleKey, PairKey
from mosaic.profiler.subject import Subject

Beside = tuple[tuple[str, tuple[int, ...]], ...]
"""Modules and the slots that each has, no slot twice."""

_LOG = logging.getLogger("mosaic")


def choose_pairs(graph: ModuleGraph, device: Device) -> list[Beside]:
    """Returns pairs that may share a stage, each on half of the device."""
    half = device.num_slots // 2
    if half < 1:
        return []
    return [
        lay_out(pair, (half, device.num_slots - half))
        for pair in itertools.combinations(graph.names, 2)
        if graph.independent(*pair)
    ]


def lay_out(modules: Sequence[str], quotas: Sequence[int]) -> Beside:
    """Gives modules slots side by side, from slot 0 on."""
    starts = itertools.accumulate(quotas, initial=0)
    return tuple(
        (module, tuple(range(start, start + quota)))
        for module, quota, start in zip(modules, quotas, starts, strict=False)
    )


class Pairs:
    """Measures layouts, or finds them in the cache."""

    def __init__(
        self,
        site: MeasuringSite,
        subjects: Mapping[str, Subject],
        keys: Mapping[str, ModuleKey],
        tell: Callable[[str], None],
    ) -> None:
        """Takes modules and under what their measurements are kept; ``tell`` hears of each layout first."""
        self._site = site
        self._subjects = dict(subjects)
        self._keys = dict(keys)
        self._tell = tell

    def measured(self, layouts: Sequence[Beside]) -> Iterator[PairSample]:
        """Yields two samples a pair and phase; a pair that fails is logged, and none is measured after the deadline."""
        for layout in layouts:
            yield from self._measure(layout)

    def _measure(self, layout: Beside) -> tuple[PairSample, ...]:
        names = [name for name, _ in layout]
        key = PairKey(
            modules=tuple(self._keys[name] for name in names), quotas=tuple(len(slots) for _, slots in layout)
        )
        site, cache = self._site, self._site.cache
        known = cache.pair(key, names) if cache is not None else ()
        if min((len(pair.alone_ms) for pair in known), default=0) >= site.settings.min_repeats:
            return known
        if site.deadline.leaves_out(" beside ".join(names)):
            return known
        self._tell(" beside ".join(names))
        for name in names:  # those that came from the cache have not run yet
            site.warm_up(self._subjects[name])
        pairs: list[PairSample] = []
        with attempt() as tried:
            for phase in Phase:
                pairs += measure_pair(
                    [self._subjects[name] for name in names],
                    [site.lanes.lane(slots) for _, slots in layout],
                    phase,
                    site.settings,
                    inline=site.lanes.launches_inline,
                    device=site.torch_device,
                )
        if tried.reason is not None:
            _LOG.warning("%s were not measured side by side: %s", " and ".join(names), tried.reason)
        elif cache is not None:
            cache.add_pair(key, names, pairs)
        return tuple(pairs)
