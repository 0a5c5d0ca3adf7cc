"""Modules side by side: pairs that may share a stage, and groups that tell most about interference."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from mosaic.cost import Bandwidths, design_runs, fit_interference
from mosaic.cost.fit import Form
from mosaic.device import Device
from mosaic.errors import InvalidProfileError
from mosaic.graph import ModuleGraph
from mosaic.profile import GroupSample, HeldOutError, PairSample, Phase, Sample
from mosaic.profiler.estimate import estimate_bandwidths
from mosaic.profiler.measuring.attempt import attempt
from mosaic.profiler.measuring.points import Site
from mosaic.profiler.pairs import measure_group, measure_pair
from mosaic.profiler.records import ModuleKey, SideKey, SideRecord
from mosaic.profiler.subject import Subject

Beside = tuple[tuple[str, tuple[int, ...]], ...]
"""Modules and the slots that each has, no slot twice."""

FORMS: tuple[Form, ...] = ("additive", "full", "mosaic")
"""Forms of interference that are compared."""

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


def choose_groups(subjects: Sequence[Subject], samples: Sequence[Sample], device: Device, budget: int) -> list[Beside]:
    """Returns the groups that tell most about interference, by what each module uses of the memory's bandwidth.

    Coefficients belong to a device, so modules that depend on each other may stand side by side here: each
    runs on inputs of its own. Where bandwidth was not measured, counts stand in.
    """
    can_run = {sample.module for sample in samples if sample.infeasible is None}
    able = [subject for subject in subjects if subject.name in can_run]
    if budget < 1 or min(len(able), device.num_slots) < 2:
        return []
    bandwidths = Bandwidths(samples, estimate=estimate_bandwidths(able, device))
    runs = design_runs([subject.name for subject in able], bandwidths, device, budget=budget)
    return [lay_out(run.modules, run.quotas) for run in runs]


def interference_errors(
    groups: Sequence[GroupSample],
    pairs: Sequence[PairSample],
    samples: Sequence[Sample],
    subjects: Sequence[Subject],
    device: Device,
) -> tuple[HeldOutError, ...]:
    """Returns how well each form of interference predicts groups that it has not seen; nothing with too few groups."""
    bandwidths = Bandwidths(samples, estimate=estimate_bandwidths(subjects, device))
    found = []
    for form in FORMS:
        try:
            fit = fit_interference(groups, bandwidths, form, device=device, pairs=pairs)
        except InvalidProfileError as error:
            _LOG.info("interference, %s: %s", form, error)
            continue
        found += [phase.held_out for phase in fit.phases if phase.held_out is not None]
    return tuple(found)


def lay_out(modules: Sequence[str], quotas: Sequence[int]) -> Beside:
    """Gives modules slots side by side, from slot 0 on."""
    starts = itertools.accumulate(quotas, initial=0)
    return tuple(
        (module, tuple(range(start, start + quota)))
        for module, quota, start in zip(modules, quotas, starts, strict=False)
    )


class SideBySide:
    """Measures layouts, or finds them in the cache."""

    def __init__(
        self,
        site: Site,
        subjects: Mapping[str, Subject],
        keys: Mapping[str, ModuleKey],
        tell: Callable[[str], None],
    ) -> None:
        """Takes modules and under what their measurements are kept; ``tell`` hears of each layout first."""
        self._site = site
        self._subjects = dict(subjects)
        self._keys = dict(keys)
        self._tell = tell

    def pairs(self, layouts: Sequence[Beside]) -> Iterator[PairSample]:
        """Yields two samples a pair and phase; a pair that fails is logged, and none is measured after the deadline."""
        for layout in layouts:
            yield from self._measure(layout, "pair").pairs

    def groups(self, layouts: Sequence[Beside]) -> Iterator[GroupSample]:
        """Yields a sample a group and phase; as pairs."""
        for layout in layouts:
            yield from self._measure(layout, "group").groups

    def _measure(self, layout: Beside, kind: str) -> SideRecord:
        names = [name for name, _ in layout]
        key = SideKey(
            kind="pair" if kind == "pair" else "group",
            modules=tuple(self._keys[name] for name in names),
            quotas=tuple(len(slots) for _, slots in layout),
        )
        cache = self._site.cache
        known = cache.side(key, names) if cache is not None else SideRecord(key=key)
        if self._is_enough(known) or self._site.deadline.leaves_out(" beside ".join(names)):
            return known
        self._tell(" beside ".join(names))
        pairs: list[PairSample] = []
        groups: list[GroupSample] = []
        for name in names:  # those that came from the cache have not run yet
            self._site.warm_up(self._subjects[name])
        with attempt() as tried:
            for phase in Phase:
                self._run(layout, phase, pairs if kind == "pair" else None, groups)
        if tried.reason is not None:
            _LOG.warning("%s were not measured side by side: %s", " and ".join(names), tried.reason)
        elif cache is not None:
            cache.add_side(key, names, pairs=pairs, groups=groups)
        return SideRecord(key=key, pairs=tuple(pairs), groups=tuple(groups))

    def _run(self, layout: Beside, phase: Phase, pairs: list[PairSample] | None, groups: list[GroupSample]) -> None:
        site = self._site
        subjects = [self._subjects[name] for name, _ in layout]
        lanes = [site.lanes.lane(slots) for _, slots in layout]
        inline, device = site.lanes.launches_inline, site.torch_device
        if pairs is not None:
            (first, second), (one, other) = subjects, lanes
            pairs += measure_pair(first, second, (one, other), phase, site.settings, inline=inline, device=device)
            return
        group = measure_group(subjects, lanes, phase, site.settings, inline=inline, device=device)
        if group is not None:
            groups.append(group)

    def _is_enough(self, known: SideRecord) -> bool:
        counts = [len(pair.alone_ms) for pair in known.pairs]
        counts += [len(member.alone_ms) for group in known.groups for member in group.members]
        return min(counts, default=0) >= self._site.settings.min_repeats
