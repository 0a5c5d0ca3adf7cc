"""Times on a simulated GPU that is unlike its description, to judge models that start from the description.

A model that knows the simulator would be judged by itself. So this device differs in ways that the prior of shapes
(``mosaic.cost.surfaces.shape_prior``) does not have or does not know: other tiles and splits, an efficiency of its own
for each kind of operator, each operator, each phase and module, another bandwidth of an SM and launch time, and
arithmetic that overlaps traffic only in part. All factors are drawn; how wide is written below.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch

from bench.cost.ground import FIT_DEGREES, HELD_DEGREE
from bench.cost.models import NAMES, input_shape, make_module
from mosaic.cost.analytic import count_degrees
from mosaic.cost.counts import Gemm, ModuleCounts, Operator, OperatorKind, PhaseCounts
from mosaic.cost.roofline import efficiency_of, ideal_time
from mosaic.hardware import Hardware, find_hardware
from mosaic.profile import Phase, Sample

COUNTED = tuple(name for name in NAMES if name != "audio")
"""Modules whose counts are quick to get: recurrent cells are counted step by step."""
DEVICES: Mapping[int, tuple[int, ...]] = MappingProxyType({16: (0, 1, 2), 66: (0,)})
"""Simulated devices by seed, for each number of slots; the many slots of one take as long as three of few."""

_TILES = ((256, 128, 1.05), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
_SPLITS = (1, 2, 4)
_MIN_SPLIT = 512
_KIND, _OPERATOR, _TRAFFIC, _DRAWN, _LAUNCH = 0.35, 0.15, 0.2, 0.3, 0.4


def described(num_slots: int) -> Hardware:
    """Returns the description of an H100 cut into slots."""
    return replace(find_hardware("h100-80g"), sms_per_slot=132 // num_slots)


@cache
def counted_modules() -> dict[str, dict[int, ModuleCounts]]:
    """Counts all modules at GPU sizes without any data."""
    found = {}
    for name in COUNTED:
        with torch.device("meta"):
            module = make_module(name, "gpu").to(torch.bfloat16)
            given = torch.empty(input_shape(name, "gpu"), dtype=torch.bfloat16)
        found[name] = count_degrees(module, (given,), degrees=(*FIT_DEGREES, HELD_DEGREE))
    return found


@cache
def simulated_samples(num_slots: int, degree: int, device: int = 0) -> tuple[Sample, ...]:
    """Returns what a device takes at every quota, for all modules and phases."""
    unlike = _Unlike.draw(described(num_slots), device)
    found = []
    for name, by_degree in counted_modules().items():
        for phase in Phase:
            times = unlike.times_ms(by_degree[degree].phase(phase), f"{device} {name} {phase}")
            found += [
                Sample(module=name, phase=phase, quota=quota, degree=degree, times_ms=(time,))
                for quota, time in enumerate(times, start=1)
            ]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unlike:
    """One device."""

    hardware: Hardware
    sharpness: float
    """How well arithmetic and traffic overlap; infinite is the roofline."""

    @classmethod
    def draw(cls, hardware: Hardware, seed: int) -> _Unlike:
        dice = random.Random(seed)
        other = replace(
            hardware,
            sm_gb_per_s=hardware.sm_gb_per_s * dice.lognormvariate(0, _DRAWN),
            launch_us=hardware.launch_us * dice.lognormvariate(0, _LAUNCH),
        )
        return cls(hardware=other, sharpness=dice.uniform(2.5, 8))

    def times_ms(self, counts: PhaseCounts, seed: str) -> list[float]:
        """Returns times at one slot, two slots, ...; more slots never take longer."""
        dice = random.Random(seed)
        kinds = {kind: dice.lognormvariate(0, _KIND) for kind in OperatorKind}
        own = [(dice.lognormvariate(0, _OPERATOR), dice.lognormvariate(0, _TRAFFIC)) for _ in counts.operators]
        times: list[float] = []
        for quota in range(1, self.hardware.num_slots + 1):
            parts = (
                operator.calls * self._operator_ms(operator, quota, (kinds[operator.kind] * arithmetic, traffic))
                for operator, (arithmetic, traffic) in zip(counts.operators, own, strict=True)
            )
            time = sum(parts)
            times.append(min(time, times[-1]) if times else time)
        return times

    def _operator_ms(self, operator: Operator, quota: int, reached: tuple[float, float]) -> float:
        hardware, num_sms = self.hardware, quota * self.hardware.sms_per_slot
        ideal = ideal_time(operator, hardware, num_sms, with_waves=False)
        waves = _waves(operator.gemm, num_sms) if operator.gemm is not None and operator.flops else 1.0
        compute = ideal.compute_ms * waves / min(1.0, efficiency_of(operator.kind, hardware) * reached[0])
        memory = ideal.memory_ms / min(1.0, hardware.efficiency.memory * reached[1])
        both = (compute**self.sharpness + memory**self.sharpness) ** (1 / self.sharpness)
        return float(both + operator.kernels * hardware.launch_us / 1e3)


def _waves(gemm: Gemm, num_sms: int) -> float:
    best = float("inf")
    for rows, columns, rate in _TILES:
        grid = -(-gemm.m // rows) * -(-gemm.n // columns)
        padding = grid * rows * columns / max(1, gemm.m * gemm.n)
        for parts in _SPLITS:
            if parts > 1 and gemm.k < parts * _MIN_SPLIT:
                break
            tiles = max(1, gemm.batch * grid * parts)
            best = min(best, padding / rate * -(-tiles // num_sms) * num_sms / tiles)
    return max(1.0, best)
