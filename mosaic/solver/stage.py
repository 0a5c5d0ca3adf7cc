"""One stage: the machine that it has to fit on, and the allocation of its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.solver.options import DeploymentOption
from mosaic.solver.slots import Choice, Starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices that a stage has to fit on."""

    num_devices: int
    """Devices, all alike."""
    num_slots: int
    """Slots of each."""
    memory_bytes: int
    """Memory of each in bytes; 0 where unknown, which then limits nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """The best allocation of one stage."""

    latency_ns: int
    """Time of its slowest module, forward and backward, beside the others; in nanoseconds."""
    choices: Mapping[str, Choice]
    """Option and devices of each module."""
    starts: Mapping[str, Starts]
    """First slot of each module on each of its devices."""

    def beside(self, name: str, device: int) -> list[tuple[str, int]]:
        """Returns the neighbours of a module on one device, each with its quota in slots."""
        return [(n, o.quota) for n, (o, devices) in self.choices.items() if n != name and device in devices]


def alone(name: str, options: Sequence[DeploymentOption]) -> StageResult:
    """Returns the stage of one module alone at its fastest, on as few slots as that takes."""
    least = min(option.forward_ns + option.backward_ns for option in options)
    fastest = [option for option in options if option.forward_ns + option.backward_ns == least]
    best = min(fastest, key=lambda option: (option.area, option))
    choice = (best, tuple(range(best.degree)))
    return StageResult(latency_ns=best.latency_ns, choices={name: choice}, starts={name: (0,) * best.degree})
