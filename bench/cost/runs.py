"""Which groups are fitted and which are held out: drawn before anything is measured, never one in both."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.cost.interference import GroupRun, HasBandwidth, design_runs
from mosaic.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Runs to fit and, by number of modules, runs to judge by.

    Raises:
        ValueError: A run is in both: the same modules at the same quotas.
    """

    fit: tuple[GroupRun, ...]
    """Measured first."""
    held: Mapping[int, tuple[GroupRun, ...]]
    """Measured when every form has been fitted."""

    def __post_init__(self) -> None:
        both = {key(run) for run in self.fit} & {key(run) for runs in self.held.values() for run in runs}
        if both:
            raise ValueError(f"{len(both)} runs are fitted and held out, such as {sorted(min(both, key=len))}")


def key(run: GroupRun) -> frozenset[tuple[str, int]]:
    """Names a run whatever its order."""
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
) -> Split:
    """Designs the runs to fit (of two to eight modules) and draws others to judge by.

    Args:
        names: Modules.
        bandwidths: What they use alone, or estimates.
        device: Where they will run.
        num_fit: Most runs to fit; where there are few in all, two thirds of them.
        num_held: Most runs to judge by, of each number of modules.
        counts: Numbers of modules to judge.
        seed: Of the draw.
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
    return Split(fit=fit, held=held)


def _draw(names: Sequence[str], count: int, num_slots: int, dice: random.Random) -> GroupRun:
    cuts = sorted(dice.sample(range(1, num_slots), count - 1))
    quotas = tuple(after - before for before, after in zip([0, *cuts], [*cuts, num_slots], strict=True))
    return GroupRun(modules=tuple(dice.sample(list(names), count)), quotas=quotas)
