"""The rules of an instance and the time of a plan, checked anew from the instance's tables.

Shares no code with any solver, cost model or search: only the two file formats. What it says is the authority.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.plan import Placement, Plan, Stage
from mosaic.solver.instance import Instance, InstanceModule, InstanceOption

ROUNDING = 1e-6
"""Relative difference of times that counts as none; searches work in whole nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of the checker."""

    problems: tuple[str, ...]
    """One sentence for each rule that is broken; empty for a plan that keeps them all."""
    objective_ms: float | None
    """Each stage's slowest forward and slowest backward, added up; None where a module's time cannot be told."""

    @property
    def is_valid(self) -> bool:
        """True if the plan keeps every rule."""
        return not self.problems


def check_plan(instance: Instance, plan: Plan) -> Verdict:
    """Checks machine, options, pins, slots, memory, order, completeness and the times that the plan claims."""
    modules = {module.name: module for module in instance.modules}
    problems = [*_machine(instance, plan), *_completeness(set(modules), plan), *_order(instance, plan)]
    total: float | None = 0.0
    for index, stage in enumerate(plan.stages):
        known = [placement for placement in stage.placements if placement.module in modules]
        chosen = {p.module: _option(modules[p.module], p) for p in known}
        of = f"stage {index}: "
        problems += [f"{of}{found}" for found in _choices(modules, known, chosen)]
        problems += [f"{of}{found}" for found in _cells(instance, stage)]
        if None in chosen.values() or len(known) < len(stage.placements):
            total = None
            continue
        options = {name: option for name, option in chosen.items() if option is not None}
        problems += [f"{of}{found}" for found in _memory(instance, known, options)]
        forward_ms, backward_ms, wrong = _times(instance, known, options)
        problems += [f"{of}{found}" for found in wrong]
        total = None if total is None else total + forward_ms + backward_ms
    problems += _held(instance, plan, modules)
    return Verdict(problems=tuple(problems), objective_ms=total)


def _machine(instance: Instance, plan: Plan) -> list[str]:
    found = (plan.num_devices, plan.device.num_slots)
    if found == (instance.num_devices, instance.num_slots):
        return []
    return [
        f"the plan is for {found[0]} devices of {found[1]} slots; "
        f"the instance has {instance.num_devices} of {instance.num_slots}"
    ]


def _completeness(known: set[str], plan: Plan) -> list[str]:
    placed = Counter(placement.module for stage in plan.stages for placement in stage.placements)
    return (
        [f"{name!r} is not placed" for name in sorted(known - set(placed))]
        + [f"{name!r} is placed, and not in the instance" for name in sorted(set(placed) - known)]
        + [f"{name!r} is placed {count} times" for name, count in sorted(placed.items()) if count > 1]
    )


def _order(instance: Instance, plan: Plan) -> list[str]:
    stage_of = {p.module: index for index, stage in enumerate(plan.stages) for p in stage.placements}
    return [
        f"{module.name!r} is in stage {stage_of[module.name]} and waits for {other!r} in stage {stage_of[other]}"
        for module in instance.modules
        for other in module.after
        if module.name in stage_of and other in stage_of and stage_of[module.name] <= stage_of[other]
    ]


def _option(module: InstanceModule, placement: Placement) -> InstanceOption | None:
    shape = (len(placement.devices), len(placement.slots))
    return next((option for option in module.options if (option.degree, option.quota) == shape), None)


def _choices(
    modules: dict[str, InstanceModule], known: Sequence[Placement], chosen: dict[str, InstanceOption | None]
) -> list[str]:
    found = []
    for placement in known:
        option, pin = chosen[placement.module], modules[placement.module].pin
        shape = f"degree {len(placement.devices)} and quota {len(placement.slots)}"
        if option is None:
            found.append(f"{placement.module!r} has {shape}, which its table lacks")
        elif (pin.degrees and option.degree not in pin.degrees) or (pin.quotas and option.quota not in pin.quotas):
            found.append(f"{placement.module!r} has {shape}, which its pin forbids")
    return found


def _cells(instance: Instance, stage: Stage) -> list[str]:
    """Slots are those of the machine, as many on each device, and nobody else's."""
    found = []
    holder: dict[tuple[int, int], str] = {}
    for placement in stage.placements:
        runs = placement.slots_by_device or (placement.slots,) * len(placement.devices)
        if len(set(placement.devices)) != len(placement.devices) or len(runs) != len(placement.devices):
            found.append(f"{placement.module!r} names a device twice, or not the slots of each")
        if any(len(set(run)) != len(placement.slots) for run in runs):
            found.append(f"{placement.module!r} has more slots on one device than on another, or one twice")
        for device, run in zip(placement.devices, runs, strict=False):
            for slot in run:
                if not (0 <= device < instance.num_devices and 0 <= slot < instance.num_slots):
                    found.append(f"{placement.module!r} holds slot {slot} of device {device}, which is not there")
                other = holder.setdefault((device, slot), placement.module)
                if other != placement.module:
                    found.append(f"{other!r} and {placement.module!r} both hold slot {slot} of device {device}")
    return found


def _memory(instance: Instance, known: Sequence[Placement], options: dict[str, InstanceOption]) -> list[str]:
    used: dict[int, int] = defaultdict(int)
    for placement in known:
        for device in placement.devices:
            used[device] += options[placement.module].memory_bytes
    return [
        f"device {device} needs {needed:,} bytes and has {instance.memory_bytes:,}"
        for device, needed in sorted(used.items())
        if instance.memory_bytes and needed > instance.memory_bytes
    ]


def _held(instance: Instance, plan: Plan, modules: dict[str, InstanceModule]) -> list[str]:
    """Over the whole step a device keeps what all of its modules keep, and works for one stage at a time."""
    kept: dict[int, int] = defaultdict(int)
    working: dict[int, int] = defaultdict(int)
    for stage in plan.stages:
        now: dict[int, int] = defaultdict(int)
        for placement in stage.placements:
            option = _option(modules[placement.module], placement) if placement.module in modules else None
            for device in placement.devices if option is not None else ():
                assert option is not None
                stays = option.resident_bytes + option.activation_bytes
                kept[device] += stays
                now[device] += option.memory_bytes - stays
        for device, needed in now.items():
            working[device] = max(working[device], needed)
    return [
        f"device {device} keeps {kept[device]:,} bytes across stages and works with {working[device]:,}; "
        f"it has {instance.memory_bytes:,}"
        for device in sorted(kept)
        if kept[device] and instance.memory_bytes and kept[device] + working[device] > instance.memory_bytes
    ]


def _times(
    instance: Instance, known: Sequence[Placement], options: dict[str, InstanceOption]
) -> tuple[float, float, list[str]]:
    """Returns the slowest forward and backward, and where the plan claims other times."""
    shares = {(one.module, one.beside): (one.forward, one.backward) for one in instance.disturbances}
    slowest = [0.0, 0.0]
    wrong = []
    for own in known:
        option = options[own.module]
        alone = (option.forward_ms, option.backward_ms)
        worst = [0.0, 0.0]
        for device in own.devices:
            beside = [p for p in known if p.module != own.module and device in p.devices]
            for phase in (0, 1):
                added = sum(
                    shares.get((own.module, p.module), (0.0, 0.0))[phase] * len(p.slots) / instance.num_slots
                    for p in beside
                )
                worst[phase] = max(worst[phase], alone[phase] * (1 + added))
        for phase, name, claimed in ((0, "forward", own.forward_ms), (1, "backward", own.backward_ms)):
            slowest[phase] = max(slowest[phase], worst[phase])
            if not math.isclose(claimed, worst[phase], rel_tol=ROUNDING, abs_tol=ROUNDING):
                wrong.append(f"{own.module!r} is said to take {claimed} ms {name}; it takes {worst[phase]} ms")
    return slowest[0], slowest[1], wrong
