"""A plan's rectangles in predicted time: shared by the picture and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mosaic.plan import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBar:
    """One module's predicted forward or backward on one device."""

    module: str
    """Name in the graph."""
    phase: Literal["forward", "backward"]
    """Half of the step."""
    stage: int
    """Index of its stage."""
    device: int
    """Index of the device."""
    slots: tuple[int, ...]
    """Slots of the module."""
    start_ms: float
    """Start in predicted milliseconds from the step's beginning."""
    end_ms: float
    """End in predicted milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBars:
    """A plan's step as rectangles: forwards in stage order, then backwards in the reverse order."""

    bars: tuple[PlanBar, ...]
    """One for each placement, phase and device."""
    edges_ms: tuple[tuple[int, str, float, float], ...]
    """Stage index, phase, start and end of each stage's forward and backward."""
    total_ms: float
    """Length of the step."""
    nominal: bool
    """True if the plan predicts no times, so every forward and backward has length 1."""


def bars_of_plan(plan: Plan) -> PlanBars:
    """Lays out the stages of ``plan`` one after another, each as long as its slowest module."""
    nominal = plan.predicted_ms <= 0
    order: list[tuple[int, Stage, Literal["forward", "backward"]]] = []
    order += [(index, stage, "forward") for index, stage in enumerate(plan.stages)]
    order += [(index, stage, "backward") for index, stage in reversed(tuple(enumerate(plan.stages)))]
    bars: list[PlanBar] = []
    edges: list[tuple[int, str, float, float]] = []
    now = 0.0
    for index, stage, phase in order:
        longest = 0.0
        for placement in stage.placements:
            length = placement.forward_ms if phase == "forward" else placement.backward_ms
            length = 1.0 if nominal else length
            longest = max(longest, length)
            if length > 0:
                bars += [
                    PlanBar(
                        module=placement.module,
                        phase=phase,
                        stage=index,
                        device=device,
                        slots=placement.slots_on(device),
                        start_ms=now,
                        end_ms=now + length,
                    )
                    for device in placement.devices
                ]
        edges.append((index, phase, now, now + longest))
        now += longest
    return PlanBars(bars=tuple(bars), edges_ms=tuple(edges), total_ms=now, nominal=nominal)


def slot_runs(slots: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Joins neighbouring slots: ``(0, 1, 4)`` gives ``((0, 2), (4, 1))``, each the first slot and how many."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(set(slots)):
        if runs and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return tuple(runs)


def slots_text(slots: Sequence[int]) -> str:
    """Returns slots for people: ``0-1,4``; ``none`` if there are none."""
    return ",".join(f"{a}" if n == 1 else f"{a}-{a + n - 1}" for a, n in slot_runs(slots)) or "none"


def device_text(plan: Plan) -> str:
    """Returns a plan's devices for people: ``4 × H100, 16 slots each``."""
    text = f"{plan.device.name}, {plan.device.num_slots} slots"
    return f"{plan.num_devices} × {text} each" if plan.num_devices > 1 else text


def ms_text(time_ms: float) -> str:
    """Returns milliseconds with at least three digits and no exponent."""
    return f"{time_ms:.0f}" if time_ms >= 100 else f"{time_ms:.3g}"


def rows_of_slots(plan: Plan, bars: Sequence[PlanBar]) -> list[tuple[str, tuple[PlanBar, ...]]]:
    """Returns a name and the bars of each slot.

    Devices that do the same share their rows; above 16 slots, so do neighbouring slots of a device.
    """
    merge = plan.num_devices * plan.device.num_slots > 16
    devices_of: dict[tuple[tuple[tuple[int, ...], tuple[PlanBar, ...]], ...], list[int]] = {}
    for device in range(plan.num_devices):
        device_bars = [replace(bar, device=0) for bar in bars if bar.device == device]
        rows: list[tuple[list[int], tuple[PlanBar, ...]]] = []
        for slot in plan.device.slots:
            slot_bars = tuple(bar for bar in device_bars if slot in bar.slots)
            if merge and rows and rows[-1][1] == slot_bars:
                rows[-1][0].append(slot)
            else:
                rows.append(([slot], slot_bars))
        devices_of.setdefault(tuple((tuple(slots), slot_bars) for slots, slot_bars in rows), []).append(device)
    return [
        (f"{_numbered('device', devices) + ' ' if plan.num_devices > 1 else ''}{_numbered('slot', slots)}", slot_bars)
        for same, devices in devices_of.items()
        for slots, slot_bars in same
    ]


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {slots_text(numbers)}"
