"""The measurements of ``bench.cost``: groups of modules side by side, and descriptions of the device.

Fitting and evaluation use disjoint sets of groups or modules.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from bench.cost.fits import STUDIED, Group, Member, counted_errors, fit_form, signed_errors
from bench.cost.models import NAMES, Branches, Size, make_inputs
from bench.gpu.bench import Bench
from bench.record import Figure, missing_figure, summary_figure
from mosaic.cost.counting import count_module
from mosaic.cost.counts import ModuleCounts
from mosaic.cost.roofline import phase_ms
from mosaic.engine import find_modules
from mosaic.errors import InvalidProfileError
from mosaic.hardware import Hardware, hardware_of
from mosaic.microbench.kernels import half_type
from mosaic.profile import Phase, Profile, Sample
from mosaic.profiler import ProfileSettings, default_quotas, measure_beside, profile_modules

SIZES = (2, 3, 4, 6, 8)
"""Modules side by side."""


def _side_by_side(group: Sequence[tuple[str, int]]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns modules with adjacent slots of their quotas, from slot 0."""
    ends = accumulate(quota for _, quota in group)
    return [(name, tuple(range(end - quota, end))) for (name, quota), end in zip(group, ends, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The extent of a study."""

    size: Size
    """Of the modules."""
    num_modules: int
    settings: ProfileSettings
    num_groups: int
    """Maximum number of groups per number of modules in each set."""


def _settings(repeats: int, seconds: float, foreign_share: float) -> ProfileSettings:
    # not strict: the load is recorded with every figure
    return ProfileSettings(
        warmup=1,
        min_repeats=repeats,
        max_repeats=4 * repeats,
        sample_seconds=seconds,
        foreign_share=foreign_share,
        pairs=False,
    )


TINY = Scale(size="tiny", num_modules=3, settings=_settings(2, 0.02, 2.0), num_groups=1)
QUICK = Scale(size="host", num_modules=6, settings=_settings(3, 0.1, 2.0), num_groups=5)
FULL = Scale(size="host", num_modules=8, settings=_settings(9, 0.6, 0.3), num_groups=10)
GPU = Scale(size="gpu", num_modules=8, settings=_settings(5, 0.1, 2.0), num_groups=4)


def measure_cost(bench: Bench) -> Iterator[Figure]:
    """Measurement of ``bench.gpu``."""
    yield from CostStudy(bench, TINY if bench.dry_run else GPU).run()


class CostStudy:
    """The study on one backend."""

    def __init__(self, bench: Bench, scale: Scale) -> None:
        self.bench, self.scale = bench, scale
        self.device = bench.device
        names, dtype = NAMES[: scale.num_modules], half_type(bench.torch_device)
        self._model = Branches(names, scale.size).to(bench.torch_device, dtype)
        inputs = dict(make_inputs(names, scale.size, bench.torch_device, dtype))
        self.finding = find_modules(self._model, inputs, include=["branches.*"])
        self.names = self.finding.graph.names
        self.sizes = [size for size in SIZES if size <= min(self.device.num_slots, len(self.names))]
        self.quotas = tuple(sorted({1, *default_quotas(self.device)}))

    def run(self) -> Iterator[Figure]:
        """Yields all figures; a failing part loses only its figures."""
        for part in (self._measure_groups, self._measure_descriptions):
            name = part.__name__.removeprefix("_measure_")
            if not self.bench.budget.allows(name):
                yield missing_figure(name, "no time was left")
                continue
            try:
                yield from part()
            except Exception as error:  # the study reports the failure and continues
                yield missing_figure(name, error)

    @cached_property
    def profile(self) -> Profile:
        """Profiles the modules alone at every quota."""
        return profile_modules(
            self._model,
            self.finding.subjects,
            self.finding.graph,
            self.bench.backend,
            quotas=self.quotas,
            settings=self.scale.settings,
        )

    @cached_property
    def counts(self) -> dict[str, ModuleCounts]:
        """Counts the operators of every module."""
        return {
            s.name: count_module(s.module, s.args, s.kwargs, target=self.device.kind) for s in self.finding.subjects
        }

    @cached_property
    def hardware(self) -> Hardware | None:
        """Returns the description of the device; None without one with this number of slots."""
        described = hardware_of(self.device)
        return described if described is not None and described.num_slots == self.device.num_slots else None

    @cached_property
    def bandwidths(self) -> dict[tuple[str, Phase], dict[int, float]]:
        """Bandwidth of modules alone by quota: counted bytes over measured time."""
        self.bench.notes.append("bandwidths are counted bytes over measured times, not measured")
        samples = [s for s in self.profile.samples if s.times_ms and s.median_ms > 0]
        rates = [self.counts[s.module].phase(s.phase).moved_bytes / s.median_ms / 1e6 for s in samples]
        peak = self.hardware.memory_gb_per_s if self.hardware is not None else max(rates, default=1.0)
        return by_quota((sample, min(1.0, rate / peak)) for sample, rate in zip(samples, rates, strict=True))

    def drawn_share(self, module: str, phase: Phase, quota: int) -> float:
        """Returns the share of bandwidth that a module uses alone, linear in the logarithm of the quota."""
        quotas, shares = zip(*sorted(self.bandwidths[module, phase].items()), strict=True)
        return float(np.interp(math.log(quota), np.log(quotas), shares))

    def _measure_groups(self) -> Iterator[Figure]:
        fit_sets, judge_sets = draw_sets(self.names, self.device.num_slots, self.sizes, self.scale.num_groups)
        fit, judge, again = (self._run_groups(groups) for groups in (fit_sets, judge_sets, judge_sets))
        fitted, reasons = {}, {}
        for words, form in STUDIED.items():
            try:
                fitted[words] = fit_form(form, fit, self.drawn_share)
            except ValueError as error:
                reasons[words] = str(error)
        for size in (*self.sizes, None):
            of = f"{size} modules" if size is not None else "all sizes"
            groups = [group for group in judge if size in (len(group), None)]
            slowdowns = [member.beside_ms / member.alone_ms for group in groups for member in group]
            yield mean_figure(f"slowdown in other groups of the fitted modules, {of}", slowdowns)
            for words, form in STUDIED.items():
                errors = signed_errors(form, fitted[words], groups, self.drawn_share) if words in fitted else []
                name = f"error on other groups of the fitted modules, {of}, {words}"
                yield mean_figure(name, [abs(e) for e in errors], reason=reasons.get(words, ""))
        twice = {_key(group): group for group in again}
        pairs = [(first, two) for group in judge for first, two in zip(group, twice.get(_key(group), ()), strict=False)]
        yield mean_figure(
            "difference of the same groups run twice",
            [abs(two.beside_ms / first.beside_ms - 1) for first, two in pairs],
        )

    def _run_groups(self, groups: Sequence[tuple[tuple[str, int], ...]]) -> list[Group]:
        """Runs groups in both phases, within the time limit."""
        subjects = {subject.name: subject for subject in self.finding.subjects}
        layouts = [_side_by_side(group) for group in groups]
        ran: list[Group] = []
        with self.bench.backend.open_lanes({slots for layout in layouts for _, slots in layout}) as lanes:
            for layout in layouts:
                if not self.bench.budget.allows(" beside ".join(name for name, _ in layout)):
                    continue
                for phase in Phase:
                    times = measure_beside(
                        [subjects[name] for name, _ in layout],
                        [lanes.lane(slots) for _, slots in layout],
                        phase,
                        self.scale.settings,
                        inline=lanes.launches_inline,
                        device=self.bench.torch_device,
                    )
                    members = tuple(
                        Member(
                            module=name,
                            phase=phase,
                            quota=len(slots),
                            alone_ms=statistics.median(time.alone_ms),
                            beside_ms=statistics.median(time.beside_ms),
                        )
                        for (name, slots), time in zip(layout, times, strict=False)
                    )
                    if members:
                        ran.append(members)
        return ran

    def _measure_descriptions(self) -> Iterator[Figure]:
        """Fits with every second module, and evaluates the others."""
        hardware = self.hardware
        if hardware is None:
            raise InvalidProfileError(f"no description fits {self.device.name}, {self.device.num_slots} slots")
        fit, judge = (self._errors(hardware, self.names[at::2]) for at in (0, 1))
        for words, errors in counted_errors(fit, judge).items():
            yield mean_figure(f"analytic error on other modules, {words}", errors)

    def _errors(self, hardware: Hardware, names: Sequence[str]) -> list[float]:
        """Returns the logarithm of predicted over measured time of each sample."""
        errors = []
        for sample in self.profile.samples:
            counts = self.counts[sample.module].phase(sample.phase)
            if sample.module in names and counts.operators and sample.times_ms:
                predicted_ms = phase_ms(counts, hardware, sample.quota * hardware.sms_per_slot)
                errors += [math.log(predicted_ms / sample.median_ms)] if sample.median_ms > 0 else []
        return errors


def draw_sets(
    names: Sequence[str], num_slots: int, sizes: Sequence[int], num_groups: int
) -> tuple[tuple[tuple[tuple[str, int], ...], ...], ...]:
    """Draws disjoint sets of groups for fitting and evaluation.

    Quotas leave at most a quarter of the device unused, if possible.
    """
    dice, quotas = random.Random(0), range(1, num_slots)
    drawn: dict[frozenset[tuple[str, int]], tuple[tuple[str, int], ...]] = {}
    for size in sizes:
        least, before = min(num_slots * 3 // 4, size * max(quotas)), len(drawn)
        for _ in range(1000 * num_groups):
            group = tuple((name, dice.choice(quotas)) for name in dice.sample(list(names), size))
            if least <= sum(quota for _, quota in group) <= num_slots and len(drawn) - before < 2 * num_groups:
                drawn.setdefault(frozenset(group), group)
    groups = tuple(drawn.values())
    return groups[0::2], groups[1::2]


def by_quota(shares: Iterable[tuple[Sample, float]]) -> dict[tuple[str, Phase], dict[int, float]]:
    drawn: dict[tuple[str, Phase], dict[int, float]] = {}
    for sample, share in shares:
        drawn.setdefault((sample.module, sample.phase), {})[sample.quota] = share
    return drawn


def _key(group: Group) -> tuple[tuple[str, int, Phase], ...]:
    return tuple((member.module, member.quota, member.phase) for member in group)


def mean_figure(name: str, samples: Sequence[float], *, reason: str = "") -> Figure:
    """Returns the mean of samples, the paper's *average* error."""
    labels = {"num_samples": str(len(samples))}
    return summary_figure(
        name, samples, statistic=statistics.fmean, labels=labels, reason=reason or "nothing was measured"
    )
