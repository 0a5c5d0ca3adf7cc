"""Memory of a device over a whole step, and devices for modules so that none holds more than it has.

During a stage a device holds what the stage's modules need (``DeploymentOption.memory_bytes``), and, of all modules of
other stages that it has ever been given, what they keep: parameters, gradients, optimizer state, and activations from
forward to backward (``kept_bytes``). At the turn from forward to backward every activation is there at once. So

    held(device) = sum over its modules of kept + the most that one stage's modules on it work with beyond that,

whatever the order of the stages. Devices are alike, and nothing ties a module's devices in one stage to those of
another stage: devices are chosen here, for all stages together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mosaic.search_extension import load_search
from mosaic.solver.options import DeploymentOption
from mosaic.solver.slots import Choice, lay_out
from mosaic.solver.stage import Machine, StageResult

MAX_NODES = 20_000
"""Places of modules that are tried before devices are given up."""
_MAX_SWAPS = 200

Stages = tuple[StageResult, ...]
_LONG = 1e6


def keeps_anything(options: Mapping[str, Sequence[DeploymentOption]], machine: Machine) -> bool:
    """Whether memory held across stages can rule anything out."""
    return machine.memory_bytes > 0 and any(option.kept_bytes for own in options.values() for option in own)


def held_bytes(stages: Sequence[StageResult], num_devices: int) -> tuple[int, ...]:
    """Returns what each device holds at its fullest, in bytes."""
    kept, most = [0] * num_devices, [0] * num_devices
    for stage in stages:
        working = [0] * num_devices
        for option, devices in stage.choices.values():
            for device in devices:
                kept[device] += option.kept_bytes
                working[device] += option.working_bytes
        most = [max(pair) for pair in zip(most, working, strict=True)]
    return tuple(sum(pair) for pair in zip(kept, most, strict=True))


def fits(stages: Sequence[StageResult], machine: Machine) -> bool:
    """Whether no device holds more than it has."""
    return not machine.memory_bytes or max(held_bytes(stages, machine.num_devices)) <= machine.memory_bytes


def swap_labels(stages: Stages, machine: Machine) -> Stages | None:
    """Gives the devices of single stages other numbers until all fit; times stay as they are.

    Greedy, stage after stage, and then by swaps of two numbers of one stage: None says that nothing was found, not that
    there is nothing.
    """
    count = machine.num_devices
    now = list(stages)
    kept = [0] * count
    for index, stage in enumerate(stages):
        own = _kept(stage, count)
        heavy = sorted(range(count), key=lambda label: -own[label])
        light = sorted(range(count), key=lambda device: kept[device])
        now[index] = _renamed(stage, dict(zip(heavy, light, strict=True)), machine)
        kept = [sum(pair) for pair in zip(kept, _kept(now[index], count), strict=True)]
    for _ in range(_MAX_SWAPS):
        held = held_bytes(now, count)
        if max(held) <= machine.memory_bytes:
            return tuple(now)
        better = _swapped(now, held, machine)
        if better is None:
            return None
        now = better
    return None


def _swapped(stages: list[StageResult], held: tuple[int, ...], machine: Machine) -> list[StageResult] | None:
    """The best swap of the fullest device with another one in one stage; None where none helps."""
    fullest = held.index(max(held))
    count = machine.num_devices
    kept = [_kept(stage, count) for stage in stages]
    working = [_working(stage, count) for stage in stages]
    keeps = [sum(column) for column in zip(*kept, strict=True)]
    best: tuple[tuple[int, ...], int, int] | None = None
    for index in range(len(stages)):
        rest = [0] * count  # the most that any other stage works with
        for own in (*working[:index], *working[index + 1 :]):
            rest = list(map(max, rest, own))
        for other in range(count):
            if other == fullest:
                continue
            changed = list(held)
            for device, new in ((fullest, other), (other, fullest)):
                stays = keeps[device] - kept[index][device] + kept[index][new]
                changed[device] = stays + max(rest[device], working[index][new])
            value = tuple(sorted(changed, reverse=True))
            if best is None or value < best[0]:
                best = value, index, other
    if best is None or best[0] >= tuple(sorted(held, reverse=True)):
        return None
    _, index, other = best
    swapped = list(stages)
    swapped[index] = _renamed(stages[index], {fullest: other, other: fullest}, machine)
    return swapped


def _working(stage: StageResult, num_devices: int) -> list[int]:
    working = [0] * num_devices
    for option, devices in stage.choices.values():
        for device in devices:
            working[device] += option.working_bytes
    return working


def _kept(stage: StageResult, num_devices: int) -> list[int]:
    kept = [0] * num_devices
    for option, devices in stage.choices.values():
        for device in devices:
            kept[device] += option.kept_bytes
    return kept


def _renamed(stage: StageResult, names: Mapping[int, int], machine: Machine) -> StageResult:
    choices = {
        name: (option, tuple(sorted(names.get(device, device) for device in devices)))
        for name, (option, devices) in stage.choices.items()
    }
    return replace(stage, choices=choices, starts=lay_out(choices, machine.num_slots))


def place_anew(stages: Stages, machine: Machine, *, ends: float = math.inf) -> Stages | None:
    """Chooses the devices of all modules anew, at the degrees and quotas that they have.

    Neighbours change, and with them what they cost each other. None: nothing was found, by ``ends`` on
    ``time.perf_counter``'s clock or within ``MAX_NODES``.
    """
    items = [(index, name, option) for index, one in enumerate(stages) for name, (option, _) in one.choices.items()]
    items.sort(key=lambda item: (-(item[2].kept_bytes + item[2].working_bytes), -item[2].area, item[1]))
    single = [(index, name, (option,)) for index, name, option in items]
    chosen, _ = _hold(single, machine, num_stages=len(stages), max_nodes=MAX_NODES, ends=ends)
    if chosen is None:
        return None
    placed = []
    for stage in stages:
        choices = {name: chosen[name] for name in stage.choices}
        placed.append(replace(stage, choices=choices, starts=lay_out(choices, machine.num_slots)))
    return tuple(placed)


def _hold(
    items: Sequence[tuple[int, str, Sequence[DeploymentOption]]],
    machine: Machine,
    *,
    num_stages: int,
    max_nodes: int,
    ends: float,
) -> tuple[dict[str, Choice] | None, bool]:
    """Places modules, each (stage, name, options of which one is to be used), in this order.

    Returns:
        The choices, or None; and whether None means that there are none.
    """
    rows = [
        (stage, [(o.degree, o.quota, o.kept_bytes, o.working_bytes) for o in options]) for stage, _, options in items
    ]
    answer, places = load_search().hold(
        rows,
        num_devices=machine.num_devices,
        num_slots=machine.num_slots,
        memory_bytes=machine.memory_bytes,
        num_stages=num_stages,
        max_nodes=max_nodes,
        seconds=max(0.0, min(_LONG, ends - time.perf_counter())),
    )
    if answer != "yes":
        return None, answer == "no"
    return {
        name: (options[option], tuple(devices))
        for (_, name, options), (option, devices) in zip(items, places, strict=True)
    }, True


def state_sets(states: Sequence[Any], degree: int) -> Iterator[tuple[int, ...]]:
    """Sets of ``degree`` devices, the least states first; devices of equal state are one choice, of None none.

    Args:
        states: Of each device, in an order that can be compared.
        degree: Devices of a set.
    """
    alike: dict[Any, list[int]] = {}
    for device, state in enumerate(states):
        if state is not None:
            alike.setdefault(state, []).append(device)
    groups = [alike[state] for state in sorted(alike)]
    for counts in _shares_of(degree, [len(group) for group in groups]):
        yield tuple(sorted(device for group, count in zip(groups, counts, strict=True) for device in group[:count]))


def _shares_of(total: int, sizes: Sequence[int]) -> Iterator[list[int]]:
    """All ways to take ``total`` from groups of these sizes: as many as can be from the first group, then fewer.

    Each way follows from the one before, since most choices of counts add up to something else.
    """
    room = [sum(sizes[index:]) for index in range(len(sizes) + 1)]
    if total > room[0]:
        return
    counts: list[int] = []
    left = total
    while True:
        while len(counts) < len(sizes):
            counts.append(min(sizes[len(counts)], left))
            left -= counts[-1]
        yield counts
        while counts:  # the last group that can give up one to those behind it
            count = counts.pop()
            left += count
            if count and left - (count - 1) <= room[len(counts) + 1]:
                counts.append(count - 1)
                left -= count - 1
                break
        else:
            return


def assign_alone(
    options: Mapping[str, Sequence[DeploymentOption]], machine: Machine, *, max_nodes: int
) -> tuple[dict[str, Choice] | None, bool]:
    """Chooses an option and devices for every module, each in a stage of its own, so that all fit.

    Modules that have a stage to themselves hold the least that any plan can: where this is impossible, no plan is.

    Args:
        options: In the order in which they are to be tried.
        machine: What there is.
        max_nodes: Places that are tried before it gives up.

    Returns:
        The choices, or None; and whether None means that there are none.
    """
    names = sorted(options, key=lambda name: (-min(o.kept_bytes + o.working_bytes for o in options[name]), name))
    items = [(index, name, options[name]) for index, name in enumerate(names)]
    return _hold(items, machine, num_stages=len(names), max_nodes=max_nodes, ends=math.inf)
