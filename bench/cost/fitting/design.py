"""The choice of modules to run side by side, and of their quotas, so that few runs tell much about interference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.cost.fitting.least_squares import Matrix
from bench.cost.fitting.leveling_fit import slopes
from bench.cost.fitting.observation import Observation, ObservationTable
from mosaic.cost.interference.leveling import demand_of
from mosaic.cost.interference.protocol import HasBandwidth
from mosaic.device import Device
from mosaic.profile import Phase

_COLUMNS = ("e1", "e2", "e3", "pressure", "product")
"""Terms of the forms that are linear; beside them stands what our form's coefficients change, near usual ones."""

_MAX_CANDIDATES = 2000
_RIDGE = 1e-6  # keeps the first determinants above zero


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """Modules to run side by side; the profiler measures each phase."""

    modules: tuple[str, ...]
    """Two or more."""
    quotas: tuple[int, ...]
    """Slots of each."""


def design_runs(
    modules: Sequence[str], bandwidths: HasBandwidth, device: Device, *, budget: int, max_modules: int = 8
) -> tuple[GroupRun, ...]:
    """Chooses runs one by one, each the one that adds most to what is known (greedily D-optimal; Fedorov, 1972).

    Known is the information matrix of the terms of all forms, computed from the bandwidths that modules use alone;
    for our form, which bends, of what its coefficients change near usual ones (a locally optimal design).
    Groups are as large as slots and ``max_modules`` allow, and each size that fits is run at least once where the
    budget has room, because Eq. 8's product cannot be told from its sum in groups of one size and alike shares, and a
    group of many tells as many times as it has members.
    The same arguments give the same runs. The first runs tell most, so a shorter budget is a prefix of a
    longer one.

    Args:
        modules: Candidates; of one model, or of several.
        bandwidths: What they use alone; estimates will do.
        device: Where they will run.
        budget: Runs.
        max_modules: Largest group.

    Raises:
        ValueError: The budget is below one, or fewer than two modules or slots could be put side by side.
    """
    largest = min(len(modules), device.num_slots, max_modules)
    if budget < 1 or largest < 2:
        raise ValueError(
            f"budget={budget}, {len(modules)} modules, {device.num_slots} slots, max_modules={max_modules}; side by "
            "side takes a budget of one or more, and two modules and slots"
        )
    candidates = list(_candidates(modules, device.num_slots, largest))
    rows = _rows(candidates, bandwidths, modules, device.num_slots)
    scale = np.abs(np.vstack(rows)).max(axis=0)
    scale[scale == 0] = 1.0
    rows = [found / scale for found in rows]
    known: Matrix = _RIDGE * np.eye(len(scale))
    chosen: list[int] = []
    while len(chosen) < min(budget, len(candidates)):
        sizes = {len(candidates[index].modules) for index in chosen}
        unseen = [size for size in range(2, largest + 1) if size not in sizes]
        open_ = [
            index
            for index, run in enumerate(candidates)
            if index not in chosen and (not unseen or len(run.modules) == unseen[0])
        ]
        gains = [_gain(known, rows[index]) for index in open_]
        best = open_[int(np.argmax(gains))]  # the first of equals
        chosen.append(best)
        known = known + rows[best].T @ rows[best]
    return tuple(candidates[index] for index in chosen)


def _candidates(modules: Sequence[str], num_slots: int, largest: int) -> Iterator[GroupRun]:
    """Groups of each size, each at even quotas and with every member in turn at most and at least of the device."""
    for size in range(2, largest + 1):
        splits = _splits(size, num_slots)
        groups = list(itertools.combinations(modules, size))
        # Evenly spread over the combinations where there are too many.
        step = max(1, -(-len(groups) * len(splits) * (largest - 1) // _MAX_CANDIDATES))
        for names in groups[::step]:
            for quotas in splits:
                yield GroupRun(modules=names, quotas=quotas)


def _splits(size: int, num_slots: int) -> list[tuple[int, ...]]:
    even = num_slots // size
    found = {(even,) * size, (1,) * size}
    for favoured in range(size):
        for share in (0.25, 0.5, 0.75):
            own = max(1, min(round(share * num_slots), num_slots - size + 1))
            rest = (num_slots - own) // (size - 1)
            found.add(tuple(own if index == favoured else rest for index in range(size)))
    return sorted(found)


def _rows(
    runs: Sequence[GroupRun], bandwidths: HasBandwidth, modules: Sequence[str], num_slots: int
) -> list[NDArray[np.float64]]:
    """For each run, both phases' terms of all members, and what our form's coefficients change there."""
    seen: list[Observation] = []
    ends = [0]
    for group, run in enumerate(runs):
        for phase in Phase:
            asked = [demand_of(bandwidths, m, phase, 1, q) for m, q in zip(run.modules, run.quotas, strict=True)]
            for index, own in enumerate(asked):
                others = (*asked[:index], *asked[index + 1 :])
                seen.append(
                    Observation(group=group, phase=phase, demand=own, beside=others, alone_ms=1.0, extra_ms=0.0)
                )
        ends.append(len(seen))
    table = ObservationTable.of(seen)
    linear = table.columns(_COLUMNS)
    every = np.hstack([linear, slopes(seen, modules, num_slots)])
    return [every[first:last] for first, last in itertools.pairwise(ends)]


def _gain(known: Matrix, rows: Matrix) -> float:
    """Growth of the logarithm of the determinant when rows are added (matrix determinant lemma)."""
    inner = np.eye(len(rows)) + rows @ np.linalg.solve(known, rows.T)
    return float(np.linalg.slogdet(inner)[1])
