"""DistMM: parallel modules on disjoint whole devices, so many each that all end at about the same time.

DistMM (NSDI 2024) has no public code, and its text was not at hand. From second-hand notes and from Mosaic's
section 2.2 (Fig. 3b): each module of a set that may run in parallel gets a whole number of devices of its own, chosen
to balance their times; dependent modules take turns. *Our reconstruction*: the exact integer balance below, levels by
longest path, what to do with devices left over, several waves where modules do not fit side by side, and
``distmm-waves``. DistMM-Pipe and its communication-aware placement have no counterpart under this cost model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.draft import (
    Balance,
    DraftWave,
    Sheet,
    Widths,
    draw_levels,
    wave_ns,
    whole_job,
)


def draw(sheet: Sheet) -> list[DraftWave]:
    """Draws DistMM's waves."""
    balance_wave = partial(balance, widths=sheet.widths, num_devices=sheet.num_devices)
    return draw_levels(sheet.graph, lambda level: waves_of_level(level, sheet.widths, sheet.num_devices, balance_wave))


def draw_best(sheet: Sheet) -> list[DraftWave]:
    """Draws the waves of ``distmm-waves``: of each level the best, where it is narrow enough to try all (ours)."""
    balance_wave = partial(balance, widths=sheet.widths, num_devices=sheet.num_devices)

    def waves_of(level: Sequence[str]) -> list[DraftWave]:
        make = best_waves if len(level) <= sheet.settings.max_partitioned else waves_of_level
        return make(level, sheet.widths, sheet.num_devices, balance_wave)

    return draw_levels(sheet.graph, waves_of)


def least_that_meets(widths: Widths, target_ns: int) -> DeploymentOption | None:
    """Returns the option of the lowest degree that takes at most ``target_ns``, or None."""
    return next((option for option in widths if option.latency_ns <= target_ns), None)


def balance(names: Sequence[str], widths: Mapping[str, Widths], num_devices: int) -> DraftWave:
    """Splits the devices among modules so that the slowest is as fast as whole devices allow.

    Exact: the optimum is one of the options' latencies, and one is met if the least degrees that meet it fit. Devices
    left over go to the slowest module that gains from them without getting slower in a phase; the rest stay idle.

    Args:
        names: Modules whose lowest degrees fit side by side.
        widths: Their options.
        num_devices: Devices to split.
    """
    targets = sorted({option.latency_ns for name in names for option in widths[name]})

    def fits(target_ns: int) -> bool:
        chosen = [least_that_meets(widths[name], target_ns) for name in names]
        return None not in chosen and sum(option.degree for option in chosen if option) <= num_devices

    first = bisect_left(targets, True, key=fits)
    assert first < len(targets), "their lowest degrees fit side by side"
    chosen = {name: option for name in names if (option := least_that_meets(widths[name], targets[first])) is not None}
    _hand_out_rest(chosen, widths, num_devices)
    return tuple(whole_job(name, chosen[name]) for name in names)


def _hand_out_rest(chosen: dict[str, DeploymentOption], widths: Mapping[str, Widths], num_devices: int) -> None:
    while True:
        idle = num_devices - sum(option.degree for option in chosen.values())
        for name, now in sorted(chosen.items(), key=lambda item: -item[1].latency_ns):
            better = [
                option
                for option in widths[name]
                if now.degree < option.degree <= now.degree + idle
                and option.latency_ns < now.latency_ns
                and option.forward_ns <= now.forward_ns
                and option.backward_ns <= now.backward_ns
            ]
            if better:
                chosen[name] = better[0]
                break
        else:
            return


def waves_of_level(
    names: Sequence[str], widths: Mapping[str, Widths], num_devices: int, balance_wave: Balance
) -> list[DraftWave]:
    """Returns one wave where the modules fit side by side, else the faster of two ways to make several (ours).

    *Filled*: longest module first, each into the first wave with room, so that long ones share a wave. *Balanced*: as
    many waves, each module into the one with least work so far.
    """
    least = {name: widths[name][0].degree for name in names}
    if sum(least.values()) <= num_devices:
        return [balance_wave(names)]
    longest_first = sorted(names, key=lambda name: -widths[name][0].latency_ns)
    filled = _spread(longest_first, least, num_devices, {}, 0)
    work = {name: widths[name][0].latency_ns * least[name] for name in names}
    balanced = _spread(longest_first, least, num_devices, work, len(filled))
    candidates = [[balance_wave(wave) for wave in waves] for waves in (filled, balanced)]
    return min(candidates, key=lambda waves: sum(map(wave_ns, waves)))


def _spread(
    order: Sequence[str], least: Mapping[str, int], num_devices: int, work: Mapping[str, int], num_waves: int
) -> list[list[str]]:
    """Puts each module into the wave with least work that has room (the first, where no work is given)."""
    waves: list[list[str]] = [[] for _ in range(num_waves)]
    for name in order:
        room = [wave for wave in waves if sum(least[other] for other in wave) + least[name] <= num_devices]
        if not room:
            room = [[]]
            waves.append(room[0])
        min(room, key=lambda wave: sum(work.get(other, 0) for other in wave)).append(name)
    return [wave for wave in waves if wave]


def best_waves(
    names: Sequence[str], widths: Mapping[str, Widths], num_devices: int, balance_wave: Balance
) -> list[DraftWave]:
    """Returns the waves of a level with the least predicted time over every way to partition it.

    Dynamic programming over sets of modules (3^n steps): the first module left joins any set that fits side by side.
    """
    everything = (1 << len(names)) - 1
    wave_of: dict[int, DraftWave] = {}
    for members in range(1, everything + 1):
        inside = [name for index, name in enumerate(names) if members >> index & 1]
        if sum(widths[name][0].degree for name in inside) <= num_devices:
            wave_of[members] = balance_wave(inside)
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # modules left -> least time, first wave
    for left in range(1, everything + 1):
        best[left] = min(
            (wave_ns(wave_of[wave]) + best[left ^ wave][0], wave) for wave in _with_the_first(left) if wave in wave_of
        )
    waves: list[DraftWave] = []
    left = everything
    while left:
        waves.append(wave_of[best[left][1]])
        left ^= best[left][1]
    return waves


def _with_the_first(members: int) -> Iterator[int]:
    """Yields every subset of a bitmask that holds its lowest bit."""
    lowest = members & -members
    rest = others = members ^ lowest
    while True:
        yield lowest | others
        if not others:
            return
        others = (others - 1) & rest
