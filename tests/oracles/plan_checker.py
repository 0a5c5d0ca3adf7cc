"""The rules of an instance and the time of a plan, checked anew from the instance's tables.

Shares no code with any solver, cost model or search: only the two file formats. What it says is the authority.
"""

from __future__ import annotations

import math
from collections import Counter

from mosaic.plan import Plan, TemporalStage
from mosaic.solver.instance import Instance, InstanceOption

ROUNDING = 1e-6
"""Relative difference of times that counts as none; searches work in whole nanoseconds."""


def checked_ms(instance: Instance, plan: Plan) -> float:
    """Asserts machine, options, slots, memory, order, completeness and the times that the plan claims.

    Returns:
        Each stage's slowest forward and slowest backward, added up.
    """
    count, room = instance.num_devices, instance.memory_bytes or math.inf
    assert (plan.num_devices, plan.device.num_slots) == (count, instance.num_slots)
    modules = {module.name: module for module in instance.modules}
    stage_of = {p.module: index for index, stage in enumerate(plan.stages) for p in stage.placements}
    assert Counter(p.module for stage in plan.stages for p in stage.placements) == Counter(list(modules))
    assert all(stage_of[other] < stage_of[name] for name, module in modules.items() for other in module.after)
    kept, most = [0] * count, [0] * count  # over the whole step a device keeps this, and works for one stage at a time
    total_ms = 0.0
    for stage in plan.stages:
        options: dict[str, InstanceOption] = {}
        cells: Counter[tuple[int, int]] = Counter()
        working = [0] * count
        for placed in stage.placements:
            module, shape = modules[placed.module], (len(placed.devices), len(placed.slots))
            option = next(option for option in module.options if (option.degree, option.quota) == shape)
            runs = placed.slots_by_device or (placed.slots,) * option.degree
            assert len(set(placed.devices)) == len(runs) == option.degree
            assert all(len(set(run)) == option.quota for run in runs)
            cells.update((device, slot) for device, run in zip(placed.devices, runs, strict=True) for slot in run)
            options[placed.module] = option
            stays = option.resident_bytes + option.activation_bytes
            for device in placed.devices:
                kept[device] += stays
                working[device] += option.memory_bytes - stays
        assert all(0 <= device < count and 0 <= slot < instance.num_slots for device, slot in cells)
        assert max(cells.values()) == 1
        most = list(map(max, most, working))
        total_ms += _stage_ms(instance, stage, options)
    assert max(map(sum, zip(kept, most, strict=True))) <= room
    return total_ms


def _stage_ms(instance: Instance, stage: TemporalStage, options: dict[str, InstanceOption]) -> float:
    """Asserts the times that the plan claims; returns the slowest forward and the slowest backward, added up."""
    shares = {(own.module, own.beside): (own.forward, own.backward) for own in instance.disturbances}
    slowest = [0.0, 0.0]
    for own in stage.placements:
        option = options[own.module]
        claimed = (own.forward_ms, own.backward_ms)
        for phase, alone_ms in enumerate((option.forward_ms, option.backward_ms)):
            added = max(
                sum(
                    shares.get((own.module, other.module), (0.0, 0.0))[phase] * len(other.slots) / instance.num_slots
                    for other in stage.placements
                    if other.module != own.module and device in other.devices
                )
                for device in own.devices
            )
            assert math.isclose(claimed[phase], alone_ms * (1 + added), rel_tol=ROUNDING, abs_tol=ROUNDING)
            slowest[phase] = max(slowest[phase], alone_ms * (1 + added))
    return sum(slowest)
