"""Memory of a simulated step: parameters and optimizer state throughout, activations from forward to backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mosaic.cost import Cost
from mosaic.graph import Part
from mosaic.plan import Plan
from mosaic.profile import ModuleMemory, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one module on each of its devices."""

    resident_bytes: int = 0
    """Parameters, gradients and optimizer state: during the whole step."""
    held_bytes: int = 0
    """Activations: from the start of its forward to the end of its backward."""
    working_bytes: int = 0
    """Anything else: while either phase runs."""


def footprints_of(plan: Plan, cost: Cost, memory: Mapping[str, ModuleMemory] | None = None) -> dict[str, Footprint]:
    """Returns what the modules of a plan hold.

    Args:
        plan: Gives the degrees.
        cost: Gives the bytes of a module while it runs, and of those it keeps.
        memory: How they divide up (a profile's ``memory``, by name). A module that is not in it is taken to hold
            all of its bytes during the whole step, which is never too little.
    """
    found: dict[str, Footprint] = {}
    for placement in plan.placements:
        total = cost.memory_bytes(placement.module, placement.degree)
        kept = (memory or {}).get(placement.module)
        stays = cost.kept_bytes(placement.module, placement.degree) if kept else total
        held = min(stays, -(-kept.activation_bytes // placement.degree)) if kept else 0
        found[placement.module] = Footprint(
            resident_bytes=stays - held,
            held_bytes=held,
            working_bytes=max(0, total - stays),
        )
    return found


Times = Mapping[tuple[Part, int, Phase], tuple[float, float]]
"""When each phase of each part and microbatch starts and ends, in milliseconds."""


def peak_bytes(plan: Plan, footprints: Mapping[str, Footprint], times: Times) -> tuple[int, ...]:
    """Returns the most bytes in use on each device; a part keeps its share of its module's, and works with all."""
    microbatches = sorted({microbatch for _, microbatch, _ in times})
    peaks = []
    for device in range(plan.num_devices):
        here = [p.part for p in plan.placements if device in p.devices and p.module in footprints]
        changes: list[tuple[float, int]] = []
        for part in here:
            own = footprints[part.module]
            held = _share(own.held_bytes, part)
            for microbatch in microbatches:
                forward, backward = (times[part, microbatch, phase] for phase in Phase)
                changes += [(forward[0], held), (backward[1], -held)]
                for start, end in (forward, backward):
                    changes += [(start, own.working_bytes), (end, -own.working_bytes)]
        level = peak = sum(_share(footprints[part.module].resident_bytes, part) for part in here)
        for _, change in sorted(changes):  # at one instant, what is given back comes first
            level += change
            peak = max(peak, level)
        peaks.append(peak)
    return tuple(peaks)


def _share(num_bytes: int, part: Part) -> int:
    """A part's share of its module's bytes, rounded up."""
    return -(-num_bytes * part.count // part.total)
