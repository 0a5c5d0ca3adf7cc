"""Groups of modules on the simulated chip: three sets, of three sets of modules."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.cost.chip.spec import Chip, Work
from bench.cost.chip.work import draw_work
from bench.cost.interference.truth import OTHER, SAME, Group, Member, Placed, Truth, draw_groups
from bench.cost.simulate import ChipScale, run_all, simulate_alone
from mosaic.cost import Bandwidths
from mosaic.profile import PairSample, Phase

HEAD = "simulated chip: "
GROUP_QUOTAS = (2, 3, 4, 6, 8, 10, 12)
ALONE_QUOTAS = (*GROUP_QUOTAS, 16)
SEED = 18
"""Of modules and groups; assumed coefficients of ``bench.cost.interference.forms`` were looked at on other seeds."""


def drawn_works(scale: ChipScale, seed: int = SEED) -> list[Work]:
    """Returns the modules of all three sets."""
    return [draw_work(1000 * seed + number) for number in range(3 * scale.num_modules)]


def simulate_truth(scale: ChipScale, *, chip: Chip | None = None, seed: int = SEED) -> Truth:
    """Runs three sets of modules alone and in groups; only the first is fitted, and the second chooses."""
    chip, dice = chip or Chip(), random.Random(seed)
    count = scale.num_modules
    works = drawn_works(scale, seed)
    fitted, chosen, other = (works[start : start + count] for start in (0, count, 2 * count))
    samples = simulate_alone(chip, works, ALONE_QUOTAS)
    alone_ms = {(sample.module, sample.quota): sample.median_ms for sample in samples}
    by_name = {work.name: work for work in works}
    taken: set[frozenset[tuple[str, int]]] = set()

    def draw(of: Sequence[Work], num: int) -> tuple[Placed, ...]:
        return draw_groups(
            [work.name for work in of],
            sizes=scale.sizes,
            count=num,
            quotas=GROUP_QUOTAS,
            num_slots=chip.num_sms,
            dice=dice,
            taken=taken,
        )

    halves = tuple(
        ((one.name, chip.num_sms // 2), (two.name, chip.num_sms // 2))
        for index, one in enumerate(fitted)
        for two in fitted[index + 1 :]
    )
    taken.update(frozenset(pair) for pair in halves)
    drawn = {
        "pairs": halves,
        "fit": draw(fitted, scale.num_fit),
        "choose": draw(chosen, scale.num_choose),
        SAME: draw(fitted, scale.num_judge),
        OTHER: draw(other, scale.num_judge),
    }
    every = [(name, placed) for name, groups in drawn.items() for placed in groups]
    every += [("again", placed) for placed in drawn[SAME]]
    jobs = [
        (tuple((by_name[name], quota) for name, quota in placed), number) for number, (_, placed) in enumerate(every)
    ]
    ran: dict[str, list[Group]] = {name: [] for name in (*drawn, "again")}
    for (name, placed), found in zip(every, run_all(chip, jobs), strict=True):
        ran[name].append(
            tuple(
                Member(
                    module=module,
                    phase=Phase.FORWARD,
                    quota=quota,
                    alone_ms=alone_ms[module, quota],
                    beside_ms=one.time_ns / 1e6,
                )
                for (module, quota), one in zip(placed, found, strict=True)
            )
        )
    return Truth(
        source="simulated",
        head=HEAD,
        num_slots=chip.num_sms,
        bandwidths=Bandwidths(samples),
        alone=samples,
        pairs=tuple(sample for group in ran["pairs"] for sample in _pair_samples(group)),
        fit=tuple(ran["fit"]),
        choose=tuple(ran["choose"]),
        judge={name: tuple(ran[name]) for name in (SAME, OTHER)},
        again=tuple(ran["again"]),
    )


def _pair_samples(group: Group) -> tuple[PairSample, ...]:
    return tuple(
        PairSample(
            module=one.module,
            beside=two.module,
            phase=one.phase,
            quota=one.quota,
            beside_quota=two.quota,
            times_ms=(one.beside_ms,),
            alone_ms=(one.alone_ms,),
        )
        for one, two in (group, group[::-1])
    )
