"""Modules in a given order, each on the devices and slots that are free first: a plan without stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mosaic.graph import ModuleGraph
from mosaic.solver.options import DeploymentOption


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What list scheduling is given."""

    order: tuple[str, ...]
    """Modules, each after what feeds it."""
    options: Mapping[str, DeploymentOption]
    """Degree and quota of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where a module runs, and what it waits for."""

    module: str
    """Name in the graph."""
    option: DeploymentOption
    """Degree and quota."""
    devices: tuple[int, ...]
    """Rising."""
    starts: tuple[int, ...]
    """First slot on each of them."""
    before: frozenset[str]
    """Modules that feed it or hold one of its slots before it does."""
    behind: set[str]
    """The same the other way round: what its backward waits for."""


def list_schedule(candidate: Candidate, graph: ModuleGraph, num_devices: int, num_slots: int) -> tuple[Lane, ...]:
    """Places each module so that it ends first; of equal places the one that was free for the shortest time."""
    free = np.zeros((num_devices, num_slots))  # when each slot's last forward ends
    holder = np.full((num_devices, num_slots), -1)
    ended: dict[str, float] = {}
    lanes: list[Lane] = []
    for name in candidate.order:
        option = candidate.options[name]
        fed = graph.predecessors(name)
        ready = max((ended[other] for other in fed), default=0.0)
        windows = np.lib.stride_tricks.sliding_window_view(free, option.quota, axis=1)
        opens = windows.max(axis=2)
        idle = np.maximum(ready, opens) - windows.mean(axis=2)
        score = np.maximum(opens, ready) + 1e-6 * idle
        first = score.argmin(axis=1)
        devices = np.sort(np.argsort(score[np.arange(num_devices), first], kind="stable")[: option.degree])
        starts = first[devices]
        start = max(ready, float(opens[devices, starts].max()))
        waits = set(fed)
        for device, slot in zip(devices, starts, strict=True):
            run = slice(slot, slot + option.quota)
            waits.update(lanes[index].module for index in set(holder[device, run]) if index >= 0)
            holder[device, run] = len(lanes)
            free[device, run] = start + option.latency_ns
        ended[name] = start + option.latency_ns
        lanes.append(
            Lane(
                module=name,
                option=option,
                devices=tuple(map(int, devices)),
                starts=tuple(map(int, starts)),
                before=frozenset(waits),
                behind=set(),
            )
        )
    by_name = {lane.module: lane for lane in lanes}
    for lane in lanes:
        for other in lane.before:
            by_name[other].behind.add(lane.module)
    return tuple(lanes)
