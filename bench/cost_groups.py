"""Prediction errors at held-out groups of modules that really ran side by side (paper Fig. 12a)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.cost.figures import COUNTS, FORMS, absent, error_name, mean_figure
from bench.cost.ground import Ground
from bench.cost_runs import Split, key, split_runs
from bench.record import Figure
from mosaic.backends.base import Lanes
from mosaic.cost import CostModel, InterferenceFit, Run, fit_interference
from mosaic.cost.fit import Form
from mosaic.errors import MosaicError
from mosaic.profile import GroupSample, Phase
from mosaic.profiler.measuring.groups import Beside, lay_out
from mosaic.profiler.pairs import measure_group

REPEATED = "difference of the same held-out plans measured twice, {} modules"
SLOWDOWN = "slowdown of modules in held-out plans, {} modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One held-out plan in one phase: the time of its slowest module."""

    count: int
    """Modules."""
    form: Form
    """Which form predicted."""
    predicted_ms: float
    """From surfaces and the form; nothing of the group itself went in."""
    measured_ms: float
    """Beside all others."""

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return abs(self.predicted_ms / self.measured_ms - 1)


Fits = Mapping[Form, InterferenceFit | str]
"""By form: its coefficients, or why there are none."""


@dataclass(slots=True)
class Seen:
    """What other parts and pictures use."""

    judged: list[Judged] = field(default_factory=list)
    """Comparisons."""
    fits: Fits = field(default_factory=dict)
    """Empty where no group was fitted."""


def measure_groups(ground: Ground, seen: Seen) -> Iterator[Figure]:
    """Fits every form to some groups, then measures others and compares; leaves both in ``seen``."""
    missing = missing_counts(ground)
    for count, why in missing.items():
        names = [error_name(count, form) for form in FORMS]
        yield from absent([*names, SLOWDOWN.format(count), REPEATED.format(count)], why)
    counts = [count for count in COUNTS if count not in missing]
    if not counts:
        return
    split = split_of(ground, counts)
    seen.fits = fit_forms(ground, [group for _, group in measure_runs(ground, split.fit)])
    held = measure_runs(ground, [run for runs in split.held.values() for run in runs])
    again = measure_runs(ground, [run for runs in split.held.values() for run in runs])
    for count in counts:
        runs = {key(run) for run in split.held[count]}
        found = [(named, group) for named, group in held if named in runs]
        yield from _judge(ground, count, [group for _, group in found], seen)
        yield from _repeatability(count, found, again)


def missing_counts(ground: Ground) -> dict[int | str, str]:
    """Returns numbers of modules that cannot run side by side here, with the reason."""
    slots, modules = ground.num_slots, len(ground.names)
    found: dict[int | str, str] = {
        count: f"this machine has {slots} {ground.unit}" for count in COUNTS if count > slots
    }
    short = {count: f"this form of the study has {modules} modules" for count in COUNTS if count > modules}
    return short | found


def split_of(ground: Ground, counts: Sequence[int]) -> Split:
    """Draws which groups are fitted and which are held out."""
    scale = ground.scale
    return split_runs(
        ground.names,
        ground.bandwidths,
        ground.bench.device,
        num_fit=scale.num_fit,
        num_held=scale.num_held,
        counts=counts,
    )


def measure_runs(ground: Ground, runs: Sequence[Run]) -> list[tuple[frozenset[tuple[str, int]], GroupSample]]:
    """Runs groups in both phases, as far as time reaches."""
    layouts = [lay_out(run.modules, run.quotas) for run in runs]
    found = []
    with ground.bench.backend.open_lanes({slots for layout in layouts for _, slots in layout}) as lanes:
        for run, layout in zip(runs, layouts, strict=True):
            if ground.bench.budget.allows(f"{' beside '.join(run.modules)}"):
                found += [(key(run), group) for group in _measure(ground, layout, lanes)]
    return found


def _measure(ground: Ground, layout: Beside, lanes: Lanes) -> Iterator[GroupSample]:
    subjects = {subject.name: subject for subject in ground.finding.subjects}
    for phase in Phase:
        group = measure_group(
            [subjects[name] for name, _ in layout],
            [lanes.lane(slots) for _, slots in layout],
            phase,
            ground.scale.settings,
            inline=lanes.launches_inline,
            device=ground.bench.torch_device,
        )
        if group is not None:
            yield group


def fit_forms(ground: Ground, groups: Sequence[GroupSample]) -> Fits:
    """Fits every form to the groups."""
    found: dict[Form, InterferenceFit | str] = {}
    for form in FORMS:
        try:
            found[form] = fit_interference(groups, ground.bandwidths, form, device=ground.bench.device)
        except MosaicError as error:
            found[form] = str(error)
    return found


def model_with(ground: Ground, form: Form, fit: InterferenceFit) -> CostModel:
    """Puts the fitted surfaces and a fitted form together."""
    return CostModel.from_profile(ground.profile, interference=form, fit=fit, estimate=ground.bandwidths)


def predict_ms(cost: CostModel, group: GroupSample) -> float:
    """Returns the predicted time of a group's slowest module, from surfaces alone."""
    return max(
        cost.placed_ms(
            m.module,
            m.phase,
            1,
            m.quota,
            beside=[(other.module, other.quota) for other in group.members if other is not m],
        )
        for m in group.members
    )


def measured_ms(group: GroupSample) -> float:
    """Returns the measured time of a group's slowest module."""
    return max(statistics.median(member.times_ms) for member in group.members)


def _judge(ground: Ground, count: int, groups: Sequence[GroupSample], seen: Seen) -> Iterator[Figure]:
    for form, fit in seen.fits.items():
        if isinstance(fit, str):
            yield from absent([error_name(count, form)], fit)
            continue
        cost = model_with(ground, form, fit)
        found = [
            Judged(count=count, form=form, predicted_ms=predict_ms(cost, group), measured_ms=measured_ms(group))
            for group in groups
        ]
        seen.judged += found
        why = "no time was left for held-out plans"
        yield mean_figure(error_name(count, form), [one.error for one in found], source="measured", reason=why)
    slowdowns = [member.slowdown for group in groups for member in group.members]
    yield mean_figure(SLOWDOWN.format(count), slowdowns, source="measured", reason="no time was left")


def _repeatability(
    count: int, found: Sequence[tuple[object, GroupSample]], again: Sequence[tuple[object, GroupSample]]
) -> Iterator[Figure]:
    def phases(of: Sequence[tuple[object, GroupSample]]) -> dict[tuple[object, Phase], float]:
        return {(named, group.members[0].phase): measured_ms(group) for named, group in of}

    first, second = phases(found), phases(again)
    differences = [abs(second[both] / first[both] - 1) for both in first if both in second]
    figure = mean_figure(REPEATED.format(count), differences, source="measured", reason="no time was left")
    yield replace(figure, labels={**figure.labels, "is": "the least error that any model can show here"})
