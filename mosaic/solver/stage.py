"""One stage: the machine that it has to fit on, and the allocation of its modules.

A partition is any set of slots, and a module's quota is the same on all of its devices (paper Eq. 6), but which slots
they are may differ: nothing ties a slot of one device to the same slot of another. So whatever fits by number
(Eq. 5) can be laid out, and a search need not know slots: ``predict.build_stages`` chooses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.solver.options import DeploymentOption

Choice = tuple[DeploymentOption, tuple[int, ...]]
"""A module's option and the devices it is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal devices that a stage has to fit on."""

    num_devices: int
    num_slots: int
    memory_bytes: int
    """Memory of each device; 0 limits nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """The best allocation of one stage."""

    latency_ns: int
    """Time of its slowest module, forward and backward, beside the others; in nanoseconds."""
    choices: Mapping[str, Choice]
    """Option and devices of each module."""

    @property
    def devices(self) -> list[tuple[int, ...]]:
        """Devices of each module, in the order of the choices."""
        return [devices for _, devices in self.choices.values()]

    def beside(self, name: str, device: int) -> list[tuple[str, int]]:
        """Returns the neighbours of a module on one device, each with its quota in slots."""
        return [(n, o.quota) for n, (o, devices) in self.choices.items() if n != name and device in devices]


def alone(name: str, options: Sequence[DeploymentOption]) -> StageResult:
    """Returns the stage of one module alone at its fastest, on as few slots as that takes."""
    best = min(options, key=lambda option: (option.latency_ns, option.area, option))
    return StageResult(latency_ns=best.latency_ns, choices={name: (best, tuple(range(best.degree)))})
