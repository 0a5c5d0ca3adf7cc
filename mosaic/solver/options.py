"""The ways to deploy one module: number of devices, slots per device, time and memory.

Times are whole nanoseconds: CP-SAT needs integers, and exact sums keep pruning and caching from changing an answer.
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
"""Longest phase of a module: three hours. The slowed-down times of 64 modules must sum within 64 bits."""


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
    """The part held while other stages run: parameters, gradients, optimizer state, activations."""

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
            # called thousands of times per solve
            forward_ms = time_ms(module, forward, degree, quota)
            backward_ms = time_ms(module, backward, degree, quota)
            if not (0 <= forward_ms <= MAX_MS and 0 <= backward_ms <= MAX_MS):  # also catches NaN
                is_forward = not 0 <= forward_ms <= MAX_MS
                phase, time = (forward, forward_ms) if is_forward else (backward, backward_ms)
                raise ValueError(
                    f"the cost model returns {time} ms for {module!r} {phase} at degree {degree}, quota {quota}; "
                    f"times are between 0 and {MAX_MS:.0f} ms"
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
        reason = _infeasibility(module, cost=cost, device=device, num_devices=num_devices, too_large=too_large)
        raise InfeasibleError(f"module {module!r} does not fit on any device", reasons=[reason])
    return tuple(options)


def all_options(
    graph: ModuleGraph, *, cost: Cost, device: Device, num_devices: int, percents: Sequence[float] | None = None
) -> dict[str, tuple[DeploymentOption, ...]]:
    """Lists the ways to deploy each module of a graph alone on these devices, by degree and quota.

    ``percents`` are the quotas to consider as shares of a device (paper section 5.4.2), rounded to slots; the greatest
    quota is always included. By default all quotas.

    Raises:
        InfeasibleError: Modules do not fit on any device; has each module's need and the device's limit.
        ValueError: The cost model returns a time that is negative, above ``MAX_MS`` or NaN.
    """
    options: dict[str, tuple[DeploymentOption, ...]] = {}
    reasons: list[str] = []
    for name in graph.names:
        try:
            options[name] = _module_options(name, cost=cost, device=device, num_devices=num_devices, percents=percents)
        except InfeasibleError as error:
            reasons.extend(error.reasons)
    if reasons:
        raise InfeasibleError(f"{len(reasons)} of {len(graph.names)} modules do not fit on any device", reasons=reasons)
    return options


def least_options(options: Sequence[DeploymentOption], target_ns: int) -> tuple[DeploymentOption, ...]:
    """Returns the options that meet a target latency, without dominated ones.

    Exact for the feasibility of a target without interference.
    """
    undominated: list[DeploymentOption] = []
    for option in sorted(o for o in options if o.latency_ns <= target_ns):
        if not any(k.quota <= option.quota and k.memory_bytes <= option.memory_bytes for k in undominated):
            undominated.append(option)
    return tuple(undominated)


def _infeasibility(module: str, *, cost: Cost, device: Device, num_devices: int, too_large: Sequence[int]) -> str:
    if too_large:
        return (
            f"{module!r} needs {min(too_large):,} bytes on each of its devices; {device.name} has "
            f"{device.memory_bytes:,}: use a smaller batch, more devices, or activation checkpointing"
        )
    degrees = cost.degrees(module)
    if not any(degree <= num_devices for degree in degrees):
        return (
            f"{module!r} has times for {', '.join(map(str, degrees)) or 'no number of'} devices; "
            f"there are {num_devices}: profile it at a lower degree"
        )
    quotas = sorted({quota for degree in degrees if degree <= num_devices for quota in cost.quotas(module, degree)})
    return (
        f"{module!r} needs a quota of at least {quotas[0] if quotas else 'an unknown number of'} slots; {device.name} "
        f"has {device.num_slots}: profile it at smaller quotas"
    )
