"""A stage's machine and the allocation of its modules.

A partition is any set of slots. A module's quota is the same on all of its devices (paper Eq. 6), but its slots may
differ between devices. So any allocation with enough slots (Eq. 5) can be laid out. Searches ignore slots, and
``predict.build_stages`` chooses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.solver.options import DeploymentOption

Choice = tuple[DeploymentOption, tuple[int, ...]]
"""A module's option and its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal devices for a stage."""

    num_devices: int
    num_slots: int
    memory_bytes: int
    """Memory of each device; 0: unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """The best allocation of one stage."""

    latency_ns: int
    """Forward plus backward of its slowest module beside the others, in nanoseconds."""
    choices: Mapping[str, Choice]
    """Option and devices of each module."""

    @property
    def devices(self) -> list[tuple[int, ...]]:
        """Devices of each module, in the order of the choices."""
        return [devices for _, devices in self.choices.values()]

    def beside(self, name: str, device: int) -> list[tuple[str, int]]:
        """Returns the neighbours of a module on one device, with their quotas in slots."""
        return [(n, o.quota) for n, (o, devices) in self.choices.items() if n != name and device in devices]


def alone(name: str, options: Sequence[DeploymentOption]) -> StageResult:
    """Returns the stage of one module alone at its fastest, with the fewest slots."""
    best = min(options, key=lambda option: (option.latency_ns, option.area, option))
    return StageResult(latency_ns=best.latency_ns, choices={name: (best, tuple(range(best.degree)))})
