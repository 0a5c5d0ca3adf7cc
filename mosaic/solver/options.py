"""The ways to deploy one module: number of devices, slots of each, time and memory.

Times are whole nanoseconds from here on: CP-SAT wants integers, and sums that compare the same in every order
are what makes pruning and caching unable to change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.profile import Phase

NS_PER_MS = 1_000_000
MAX_MS = 1e7
"""Longest time of a phase of a module: three hours. Those of 64 modules, slowed down, are added up in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DeploymentOption:
    """One (degree, quota) of one module; paper section 3.3, Eq. 6."""

    degree: int
    quota: int
    forward_ns: int
    """Time alone, as is ``backward_ns``."""
    backward_ns: int
    memory_bytes: int = 0
    """Memory on each device while its stage runs."""
    kept_bytes: int = 0
    """The part that stays while other stages run: parameters, gradients, optimizer state, activations."""

    @property
    def working_bytes(self) -> int:
        """The other part of ``memory_bytes``."""
        return self.memory_bytes - self.kept_bytes

    @property
    def latency_ns(self) -> int:
        """Forward and backward together: the paper's module latency."""
        return self.forward_ns + self.backward_ns

    @property
    def area(self) -> int:
        """Slots over all devices."""
        return self.degree * self.quota


def _module_options(
    module: str, *, cost: Cost, device: Device, num_devices: int, percents: Sequence[float] | None = None
) -> tuple[DeploymentOption, ...]:
    on_grid = {max(1, round(percent / 100 * device.num_slots)) for percent in percents or ()}
    time_ms, forward, backward = cost.time_ms, Phase.FORWARD, Phase.BACKWARD
    options: list[DeploymentOption] = []
    too_large: list[int] = []
    for degree in cost.degrees(module):
        if degree > num_devices:
            continue
        memory = cost.memory_bytes(module, degree)
        kept_bytes = min(memory, cost.kept_bytes(module, degree))
        if 0 < device.memory_bytes < memory:
            too_large.append(memory)
            continue
        quotas = [quota for quota in cost.quotas(module, degree) if quota <= device.num_slots]
        for quota in (quota for quota in quotas if percents is None or quota in on_grid or quota == max(quotas)):
            # Thousands of times a solve, and most of an easy one.
            forward_ms = time_ms(module, forward, degree, quota)
            backward_ms = time_ms(module, backward, degree, quota)
            if not (0 <= forward_ms <= MAX_MS and 0 <= backward_ms <= MAX_MS):  # also catches NaN
                is_forward = not 0 <= forward_ms <= MAX_MS
                phase, time = (forward, forward_ms) if is_forward else (backward, backward_ms)
                raise ValueError(
                    f"the cost model gives {module!r} {phase} a time of {time} ms at degree {degree}, quota {quota}; "
                    f"a time is finite and not negative, and at most {MAX_MS:.0f} ms"
                )
            options.append(
                DeploymentOption(
                    degree=degree,
                    quota=quota,
                    forward_ns=round(forward_ms * NS_PER_MS),
                    backward_ns=round(backward_ms * NS_PER_MS),
                    memory_bytes=memory,
                    kept_bytes=kept_bytes,
                )
            )
    if not options:
        reason = _why_none(module, cost=cost, device=device, num_devices=num_devices, too_large=too_large)
        raise InfeasibleError(f"module {module!r} fits on no device", reasons=[reason])
    return tuple(options)


def all_options(
    graph: ModuleGraph, *, cost: Cost, device: Device, num_devices: int, percents: Sequence[float] | None = None
) -> dict[str, tuple[DeploymentOption, ...]]:
    """Lists the ways to deploy each module of a graph alone on these devices, by degree and quota.

    ``percents`` are the shares of a device that count (paper section 5.4.2), each taken to the nearest slot, and always
    the greatest quota; by default all quotas.

    Raises:
        InfeasibleError: Modules fit on no device; names each of them, what it needs and what there is.
        ValueError: The cost model gives a time that is negative, above ``MAX_MS`` or not a number.
    """
    options: dict[str, tuple[DeploymentOption, ...]] = {}
    reasons: list[str] = []
    for name in graph.names:
        try:
            options[name] = _module_options(name, cost=cost, device=device, num_devices=num_devices, percents=percents)
        except InfeasibleError as error:
            reasons.extend(error.reasons)
    if reasons:
        raise InfeasibleError(f"{len(reasons)} of {len(graph.names)} modules fit on no device", reasons=reasons)
    return options


def least_options(options: Sequence[DeploymentOption], target_ns: int) -> tuple[DeploymentOption, ...]:
    """Returns the options that meet a target latency, without those that need more of everything than another.

    Exact for the feasibility of a target without interference: whatever places the larger one places the smaller.
    """
    undominated: list[DeploymentOption] = []
    for option in sorted(o for o in options if o.latency_ns <= target_ns):
        if not any(k.quota <= option.quota and k.memory_bytes <= option.memory_bytes for k in undominated):
            undominated.append(option)
    return tuple(undominated)


def _why_none(module: str, *, cost: Cost, device: Device, num_devices: int, too_large: Sequence[int]) -> str:
    if too_large:
        return (
            f"{module!r} needs {min(too_large):,} bytes on each of its devices; {device.name} has "
            f"{device.memory_bytes:,}: use a smaller batch, more devices, or activation checkpointing"
        )
    degrees = cost.degrees(module)
    if not any(degree <= num_devices for degree in degrees):
        return (
            f"{module!r} is known on {', '.join(map(str, degrees)) or 'no number of'} devices at once; "
            f"there are {num_devices}: profile it at a lower degree"
        )
    quotas = sorted({quota for degree in degrees if degree <= num_devices for quota in cost.quotas(module, degree)})
    return (
        f"{module!r} needs a quota of at least {quotas[0] if quotas else 'an unknown number of'} slots; {device.name} "
        f"has {device.num_slots}: profile it at smaller quotas"
    )
