"""Groups of modules side by side: every form's errors on groups of its own, and groups that run on a backend.

On the host two cores' worth runs side by side, on a GPU up to eight modules.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence

from bench.cost.estimates import absent, mean_figure
from bench.cost.forms import STUDIED, Fitted, fit_form
from bench.cost.ground import Ground
from bench.cost.truth import SAME, Group, Member, Placed, Truth, draw_groups
from bench.record import Figure
from mosaic.profile import Phase
from mosaic.profiler import measure_beside
from mosaic.profiler.sweep import lay_out

CHOSEN = "the form chosen by groups of its own"
ALL_SIZES = "all sizes"
SIZES = (2, 3, 4, 6, 8)
"""Modules side by side."""


def error_name(head: str, of: str, size: int | str, words: str) -> str:
    """Names the error of a form on a set of groups of one size, or of all."""
    return f"{head}error on {of}, {_size(size)}, {words}"


def slowdown_name(head: str, of: str, size: int | str) -> str:
    """Names the mean slowdown in a set."""
    return f"{head}slowdown in {of}, {_size(size)}"


def again_name(head: str) -> str:
    """Names how far the same groups differ when run twice."""
    return f"{head}difference of the same groups run twice"


def _size(size: int | str) -> str:
    return size if isinstance(size, str) else f"{size} modules"


def group_names(head: str, sets: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of all figures of groups."""
    words = (*(studied.words for studied in STUDIED), CHOSEN)
    found = [again_name(head)]
    for of in sets:
        for size in (*sizes, ALL_SIZES):
            found += [slowdown_name(head, of, size), *(error_name(head, of, size, form) for form in words)]
    return tuple(found)


Fits = tuple[dict[str, Fitted], dict[str, str]]
"""Forms that could be fitted, by their words, and why others have none."""


def fit_forms(truth: Truth) -> Fits:
    """Fits every form; returns the fits by their words, and why others have none."""
    fits: dict[str, Fitted] = {}
    reasons: dict[str, str] = {}
    for studied in STUDIED:
        try:
            fits[studied.words] = fit_form(studied, truth)
        except ValueError as error:
            reasons[studied.words] = str(error)
    return fits, reasons


def choose_form(fits: dict[str, Fitted], truth: Truth) -> str:
    """Returns the words of the form that errs least on the groups to choose by."""
    return min(fits, key=lambda words: statistics.fmean(fits[words].errors(truth, truth.choose)))


def judge_forms(truth: Truth, fitted: Fits, sizes: Sequence[int]) -> Iterator[Figure]:
    """Chooses and judges; every error with the number of coefficients behind it."""
    fits, reasons = fitted
    chosen = choose_form(fits, truth) if truth.choose else ""
    for of, groups in truth.judge.items():
        for size in (*sizes, ALL_SIZES):
            some = [group for group in groups if size in (len(group), ALL_SIZES)]
            slowdowns = [member.beside_ms / member.alone_ms for group in some for member in group]
            yield mean_figure(slowdown_name(truth.head, of, size), slowdowns, source=truth.source)
            named = {words: (words, one.studied.form) for words, one in fits.items()}
            if chosen:
                named[CHOSEN] = (chosen, chosen)
            for words, (fitted, form) in named.items():
                labels = {"form": form, "coefficients": str(fits[fitted].num_free)}
                errors = fits[fitted].errors(truth, some)
                yield mean_figure(error_name(truth.head, of, size, words), errors, source=truth.source, labels=labels)
            for words, why in reasons.items():
                yield from absent([error_name(truth.head, of, size, words)], why, source=truth.source)
    first = next(iter(truth.judge.values()), ())
    differences = [
        abs(two.beside_ms / one.beside_ms - 1)
        for before, after in zip(first, truth.again, strict=False)
        for one, two in zip(before, after, strict=True)
    ]
    labels = {"is": "the least error that any form can show here"}
    yield mean_figure(again_name(truth.head), differences, source=truth.source, labels=labels)


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
