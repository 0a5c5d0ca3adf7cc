"""Groups of modules that really run side by side on a backend: on the host two cores' worth, on a GPU up to eight."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence

from bench.cost.figures import absent
from bench.cost.ground import Ground
from bench.cost.interference.judging import fit_forms, group_names, judge_forms, slowdown_name
from bench.cost.interference.truth import SAME, Group, Member, Placed, Truth, draw_groups
from bench.record import Figure
from mosaic.profile import Phase
from mosaic.profiler.measuring.beside import measure_beside
from mosaic.profiler.measuring.pairs import lay_out

SIZES = (2, 3, 4, 6, 8)
"""Modules side by side."""


def sizes_on(ground: Ground) -> list[int]:
    """Returns how many modules can run side by side here."""
    return [size for size in SIZES if size <= min(ground.num_slots, len(ground.names))]


def measured_names(ground: Ground) -> tuple[str, ...]:
    """Returns the names of all figures of measured groups; of sizes that cannot run here, the slowdown alone."""
    sizes = sizes_on(ground)
    return (*group_names("", (SAME,), sizes), *(slowdown_name("", SAME, size) for size in SIZES if size not in sizes))


def measure_groups(ground: Ground) -> Iterator[Figure]:
    """Runs three sets of groups, fits and judges every form; leaves the fits in ``ground``."""
    sizes = sizes_on(ground)
    why = f"{ground.num_slots} {ground.unit} and {len(ground.names)} modules in this study"
    yield from absent([slowdown_name("", SAME, size) for size in SIZES if size not in sizes], why)
    if not sizes:
        return
    truth = measure_truth(ground, sizes)
    fits = fit_forms(truth)
    ground.fits = fits[0]
    yield from judge_forms(truth, fits, sizes)


def measure_truth(ground: Ground, sizes: Sequence[int]) -> Truth:
    """Draws the groups of all sets before any is measured; those that judge are measured last, and twice."""
    sets = draw_sets(ground.names, ground.num_slots, sizes, ground.scale.num_groups)
    fit, choose, judge, again = (_measure(ground, placed) for placed in (*sets, sets[-1]))
    met = {_key(group) for group in judge} & {_key(group) for group in again}
    judge, again = ([group for group in of if _key(group) in met] for of in (judge, again))
    return Truth(
        source="measured",
        head="",
        num_slots=ground.num_slots,
        bandwidths=ground.bandwidths,
        fit=tuple(fit),
        choose=tuple(choose),
        judge={SAME: tuple(judge)},
        again=tuple(again),
    )


def draw_sets(
    names: Sequence[str], num_slots: int, sizes: Sequence[int], num_groups: int
) -> tuple[tuple[Placed, ...], ...]:
    """Draws groups to fit, to choose by and to judge; none is in two sets.

    Where there are few in all, as on two cores, each set has a third of them.
    """
    dice = random.Random(0)
    drawn = draw_groups(
        names,
        sizes=sizes,
        count=3 * num_groups,
        quotas=range(1, num_slots),
        num_slots=num_slots,
        dice=dice,
        taken=set(),
    )
    return tuple(drawn[start::3] for start in range(3))


def _key(group: Group) -> tuple[tuple[str, int, Phase], ...]:
    return tuple((member.module, member.quota, member.phase) for member in group)


def _measure(ground: Ground, groups: Sequence[Placed]) -> list[Group]:
    """Runs groups in both phases, as far as time reaches."""
    subjects = {subject.name: subject for subject in ground.finding.subjects}
    layouts = [lay_out([name for name, _ in placed], [quota for _, quota in placed]) for placed in groups]
    found: list[Group] = []
    with ground.bench.backend.open_lanes({slots for layout in layouts for _, slots in layout}) as lanes:
        for layout in layouts:
            if not ground.bench.budget.allows(" beside ".join(name for name, _ in layout)):
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
                members = tuple(
                    Member(
                        module=name,
                        phase=phase,
                        quota=len(slots),
                        alone_ms=statistics.median(one.alone_ms),
                        beside_ms=statistics.median(one.beside_ms),
                    )
                    for (name, slots), one in zip(layout, times, strict=False)
                )
                if members:
                    found.append(members)
    return found
