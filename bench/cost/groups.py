"""Prediction errors at held-out groups of modules that really ran side by side (paper Fig. 12a)."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.cost.figures import COUNTS, FORM_WORDS, absent, error_name, mean_figure
from bench.cost.fitting.design import GroupRun, design_runs
from bench.cost.fitting.fitted import FITS, NO_INTERFERENCE, fit_interference
from bench.cost.fitting.group import GroupMember, GroupSample
from bench.cost.ground import Fits, Ground
from bench.record import Figure
from mosaic.cost import CostModel, HasBandwidth
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.profile import Phase
from mosaic.profiler.measuring.beside import measure_beside
from mosaic.profiler.measuring.pairs import lay_out

REPEATED = "difference of the same held-out plans measured twice, {} modules"
SLOWDOWN = "slowdown of modules in held-out plans, {} modules"

RunKey = frozenset[tuple[str, int]]
"""Names a run whatever its order."""


def group_names() -> tuple[str, ...]:
    """Returns the names of figures of held-out plans."""
    errors = [error_name(count, form) for count in COUNTS for form in FORM_WORDS]
    return (*errors, *(text.format(count) for count in COUNTS for text in (SLOWDOWN, REPEATED)))


def measure_groups(ground: Ground) -> Iterator[Figure]:
    """Fits every form to some groups, then measures others and compares; leaves the fits in ``ground``."""
    missing = missing_counts(ground)
    for count, why in missing.items():
        names = [error_name(count, form) for form in FORM_WORDS]
        yield from absent([*names, SLOWDOWN.format(count), REPEATED.format(count)], why)
    counts = [count for count in COUNTS if count not in missing]
    if not counts:
        return
    scale, device = ground.scale, ground.bench.device
    fit, held = split_runs(
        ground.names, ground.bandwidths, device, num_fit=scale.num_fit, num_held=scale.num_held, counts=counts
    )
    ground.fits = fit_forms([group for _, group in _measure_runs(ground, fit)], ground.bandwidths)
    every = [run for runs in held.values() for run in runs]
    first, second = _measure_runs(ground, every), _measure_runs(ground, every)
    for count in counts:
        keys = {key(run) for run in held[count]}
        groups = [group for named, group in first if named in keys]
        yield from _judge(ground, count, groups)
        again = {(named, group.members[0].phase): measured_ms(group) for named, group in second}
        differences = [
            abs(again[both] / measured_ms(group) - 1)
            for named, group in first
            if named in keys and (both := (named, group.members[0].phase)) in again
        ]
        figure = mean_figure(REPEATED.format(count), differences, source="measured", reason="no time was left")
        yield replace(figure, labels={"is": "the least error that any model can show here"})


def missing_counts(ground: Ground) -> dict[int | str, str]:
    """Returns numbers of modules that cannot run side by side here, with the reason."""
    slots, modules = ground.num_slots, len(ground.names)
    found: dict[int | str, str] = {
        count: f"this machine has {slots} {ground.unit}" for count in COUNTS if count > slots
    }
    return {count: f"this form of the study has {modules} modules" for count in COUNTS if count > modules} | found


def key(run: GroupRun) -> RunKey:
    """Names a run."""
    return frozenset(zip(run.modules, run.quotas, strict=True))


def split_runs(
    names: Sequence[str],
    bandwidths: HasBandwidth,
    device: Device,
    *,
    num_fit: int,
    num_held: int,
    counts: Sequence[int],
    seed: int = 0,
) -> tuple[tuple[GroupRun, ...], dict[int, tuple[GroupRun, ...]]]:
    """Designs the runs to fit (of two to eight modules) and draws others to judge by, before anything is measured.

    Args:
        names: Modules.
        bandwidths: What they use alone, or estimates.
        device: Where they will run.
        num_fit: Most runs to fit; where there are few in all, two thirds of them.
        num_held: Most runs to judge by, of each number of modules.
        counts: Numbers of modules to judge.
        seed: Of the draw.

    Returns:
        Runs to fit and, by number of modules, runs to judge by; none is in both.
    """
    dice = random.Random(seed)
    fit = design_runs(names, bandwidths, device, budget=num_fit)
    if device.num_slots == 2:  # every pair at one slot each is all there is
        fit = fit[: max(1, min(num_fit, len(names) * (len(names) - 1) // 3))]
    taken = {key(run) for run in fit}
    held: dict[int, tuple[GroupRun, ...]] = {}
    for count in counts:
        drawn: list[GroupRun] = []
        if count <= min(len(names), device.num_slots):
            for _ in range(50 * num_held):
                run = _draw(names, count, device.num_slots, dice)
                if len(drawn) < num_held and key(run) not in taken:
                    taken.add(key(run))
                    drawn.append(run)
        held[count] = tuple(drawn)
    return fit, held


def _draw(names: Sequence[str], count: int, num_slots: int, dice: random.Random) -> GroupRun:
    cuts = sorted(dice.sample(range(1, num_slots), count - 1))
    quotas = tuple(after - before for before, after in zip([0, *cuts], [*cuts, num_slots], strict=True))
    return GroupRun(modules=tuple(dice.sample(list(names), count)), quotas=quotas)


def _measure_runs(ground: Ground, runs: Sequence[GroupRun]) -> list[tuple[RunKey, GroupSample]]:
    """Runs groups in both phases, as far as time reaches."""
    subjects = {subject.name: subject for subject in ground.finding.subjects}
    layouts = [lay_out(run.modules, run.quotas) for run in runs]
    found = []
    with ground.bench.backend.open_lanes({slots for layout in layouts for _, slots in layout}) as lanes:
        for run, layout in zip(runs, layouts, strict=True):
            if not ground.bench.budget.allows(f"{' beside '.join(run.modules)}"):
                continue
            for phase in Phase:
                times = measure_beside(
                    [subjects[name] for name, _ in layout],
                    [lanes.lane(slots) for _, slots in layout],
                    phase,
                    ground.scale.settings,
                    inline=lanes.launches_inline,
                    device=ground.bench.torch_device,
                )
                if times:
                    found.append(
                        (
                            key(run),
                            GroupSample(
                                members=tuple(
                                    GroupMember(
                                        module=name,
                                        phase=phase,
                                        quota=len(slots),
                                        times_ms=one.beside_ms,
                                        alone_ms=one.alone_ms,
                                    )
                                    for (name, slots), one in zip(layout, times, strict=True)
                                )
                            ),
                        )
                    )
    return found


def fit_forms(groups: Sequence[GroupSample], bandwidths: HasBandwidth) -> Fits:
    """Fits every form to the groups."""
    found: Fits = {}
    for form in FORM_WORDS:
        try:
            found[form] = fit_interference(groups, bandwidths, form) if form in FITS else NO_INTERFERENCE
        except MosaicError as error:
            found[form] = str(error)
    return found


def predict_ms(cost: CostModel, group: GroupSample) -> float:
    """Returns the predicted time of a group's slowest module; nothing of the group itself goes in."""
    placed = [(member.module, member.quota) for member in group.members]
    return max(
        cost.placed_ms(m.module, m.phase, 1, m.quota, beside=[*placed[:index], *placed[index + 1 :]])
        for index, m in enumerate(group.members)
    )


def measured_ms(group: GroupSample) -> float:
    """Returns the measured time of a group's slowest module."""
    return max(statistics.median(member.times_ms) for member in group.members)


def _judge(ground: Ground, count: int, groups: Sequence[GroupSample]) -> Iterator[Figure]:
    for form, fit in ground.fits.items():
        if isinstance(fit, str):
            yield from absent([error_name(count, form)], fit)
            continue
        cost = fit.cost(ground.profile, ground.bandwidths)
        errors = [abs(predict_ms(cost, group) / measured_ms(group) - 1) for group in groups]
        why = "no time was left for held-out plans"
        yield mean_figure(error_name(count, form), errors, source="measured", reason=why)
    slowdowns = [member.slowdown for group in groups for member in group.members]
    yield mean_figure(SLOWDOWN.format(count), slowdowns, source="measured", reason="no time was left")
