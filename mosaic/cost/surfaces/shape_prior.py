"""The shape of a module's time over the quota, from its operators, for a device of which the description is not exact.

The roofline of ``mosaic.cost.roofline`` is evaluated many times over, each time for a device and libraries a little
different from the described ones, as real ones are:

* efficiencies of each kind of operator, those of a phase, and those of each operator, are off by factors;
* so are the host's time for a launch, a GPU's to begin a kernel, and what one SM draws of the memory;
* libraries have other tiles: some of the sizes are missing, and each reaches another share of the rate;
* arithmetic and memory traffic overlap well or badly (max(a, b) becomes (a^p + b^p)^(1/p)).

Mean and principal modes of the logarithms of all these times are the prior: where kinks, floors and waves can be, but
not at which of them a module is. Measurements choose (``mosaic.cost.surfaces.posterior``). How far off descriptions may
be are round figures of ours, wide rather than narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from mosaic.cost.counts import Gemm, ModuleCounts, Operator, OperatorKind, PhaseCounts
from mosaic.cost.roofline import efficiency_of, ideal_time
from mosaic.hardware import Hardware
from mosaic.profile import Phase
from mosaic.shape import ModuleShape, ShapeCurve

Matrix = NDArray[np.float64]

DRAWS = 128
"""Devices that are drawn."""
MODES = 10
"""Principal modes that are kept; together with the mean they have nearly all of the variance."""

_KIND, _PHASE, _OPERATOR, _DRAWN, _LAUNCH, _TILE = 0.5, 0.2, 0.2, 0.3, 0.4, 0.25
_TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.85), (64, 64, 0.7), (32, 32, 0.35))
_SPLITS = (1, 2, 4, 8)
_MIN_SPLIT = 256
_MISSING = 0.25
_OVERLAP = (2.0, 12.0)
_DIGITS = 5


def shape_of(
    module: str,
    counts: Mapping[int, ModuleCounts],
    hardware: Hardware,
    quotas: Sequence[int],
    *,
    reduce_ms: Mapping[int, float] | None = None,
    seed: int = 0,
) -> ModuleShape | None:
    """Returns the shape of a module; None where none of its phases has operators.

    Args:
        module: Its name.
        counts: What was counted, by degree.
        hardware: Description of the device.
        quotas: Slots at which to evaluate it, rising; one slot to all of the device's.
        reduce_ms: By degree, what summing gradients adds to a backward, in milliseconds.
        seed: Of the draws; the same seed gives the same shape on any machine.
    """
    drawn = _Drawn(hardware, np.array(quotas), np.random.default_rng(seed))
    keys, logs = [], []
    for phase in Phase:
        of_phase = drawn.phase()
        for degree in sorted(counts):
            operators = counts[degree].phase(phase)
            if operators.operators:
                times = drawn.times_ms(operators, of_phase, seed=seed)
                if phase is Phase.BACKWARD and reduce_ms is not None:
                    times = times + reduce_ms.get(degree, 0.0)
                keys.append((phase, degree))
                logs.append(np.log(times))
    if not keys:
        return None
    every = np.concatenate(logs, axis=1)
    mean = every.mean(axis=0)
    _, lengths, directions = np.linalg.svd((every - mean) / math.sqrt(DRAWS - 1), full_matrices=False)
    modes = (lengths[:, None] * directions)[:MODES]
    width = len(quotas)
    curves = [
        ShapeCurve(
            phase=phase.value,
            degree=degree,
            log_ms=_rounded(mean[i * width : (i + 1) * width]),
            modes=tuple(_rounded(mode[i * width : (i + 1) * width]) for mode in modes),
        )
        for i, (phase, degree) in enumerate(keys)
    ]
    return ModuleShape(
        module=module,
        quotas=tuple(quotas),
        curves=tuple(curves),
        source=f"counted operators on {hardware.name} ({hardware.source})",
    )


class _Drawn:
    """Devices and libraries that the described one may turn out to be; arrays have a row for each of them."""

    def __init__(self, hardware: Hardware, quotas: Matrix, dice: Generator) -> None:
        self._hardware, self._dice = hardware, dice
        self._sms = quotas * hardware.sms_per_slot
        drawn = hardware.sm_gb_per_s * self._factors(_DRAWN)
        self._gb_per_s = np.minimum(hardware.memory_gb_per_s, np.outer(drawn, self._sms))
        self._launch_ms = hardware.launch_us / 1e3 * self._factors(_LAUNCH)[:, None]
        begins = dice.spawn(1)[0].normal(0, _LAUNCH, DRAWS)
        self._kernel_ms = hardware.kernel_us / 1e3 * np.exp(begins)[:, None]
        self._overlap = np.exp(dice.uniform(math.log(_OVERLAP[0]), math.log(_OVERLAP[1]), DRAWS))[:, None]
        self._kinds = {kind: self._factors(_KIND) for kind in OperatorKind}
        missing = dice.random((DRAWS, len(_TILES))) < _MISSING
        missing[:, 1] = False  # every library has that one
        rates = np.array([rate for _, _, rate in _TILES]) * np.stack([self._factors(_TILE) for _ in _TILES], axis=1)
        self._rates = np.where(missing, 1e-9, rates)

    def _factors(self, sigma: float) -> Matrix:
        factors: Matrix = np.exp(self._dice.normal(0, sigma, DRAWS))
        return factors

    def phase(self) -> dict[OperatorKind, Matrix]:
        """Draws efficiencies of a phase, by kind."""
        return {kind: self._kinds[kind] * self._factors(_PHASE) for kind in OperatorKind}

    def times_ms(self, counts: PhaseCounts, of_phase: Mapping[OperatorKind, Matrix], *, seed: int) -> Matrix:
        """Returns times in milliseconds, a column for each quota."""
        # Its own dice: the same operator of another degree is off by the same factor.
        dice = np.random.default_rng(seed)
        total: Matrix = np.zeros((DRAWS, len(self._sms)))
        for operator in counts.operators:
            own = np.exp(dice.normal(0, _OPERATOR, (2, DRAWS)))
            total += operator.calls * self._operator_ms(operator, of_phase, own)
        kernels = counts.kernels
        launch_ms = kernels * self._launch_ms
        if self._hardware.kind == "host" or kernels == 0:
            return total + launch_ms
        # A line of two stages, as in ``roofline.line_ms``.
        line: Matrix = np.maximum(launch_ms + total / kernels, launch_ms / kernels + total)
        return line

    def _operator_ms(self, operator: Operator, of_phase: Mapping[OperatorKind, Matrix], own: Matrix) -> Matrix:
        hardware = self._hardware
        whole = ideal_time(operator, hardware, hardware.num_sms, network_gb_per_s=1.0, with_waves=False).compute_ms
        compute = np.outer(whole / (efficiency_of(operator.kind, hardware) * of_phase[operator.kind] * own[0]), 1.0)
        compute = compute * (hardware.num_sms / self._sms)
        if operator.gemm is not None and hardware.kind == "cuda" and operator.flops:
            compute = compute * self._waves(operator.gemm, hardware.ramp_of(operator.dtype))
        reached = hardware.efficiency.memory * of_phase[OperatorKind.MEMORY] * own[1]
        memory = operator.moved_bytes / 1e6 / self._gb_per_s / reached[:, None]
        longer, shorter = np.maximum(compute, memory), np.minimum(compute, memory)
        ratio = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
        result: Matrix = longer * (1 + ratio**self._overlap) ** (1 / self._overlap)
        return result + operator.kernels * self._kernel_ms

    def _waves(self, gemm: Gemm, ramp_k: float) -> Matrix:
        """How much longer whole waves of the best tiles take than the same arithmetic spread evenly."""
        found, tile_of = [], []
        for index, (rows, columns, _) in enumerate(_TILES):
            grid = -(-gemm.m // rows) * -(-gemm.n // columns)
            padding = grid * rows * columns / max(1, gemm.m * gemm.n)
            for parts in _SPLITS:
                if parts > 1 and gemm.k < parts * _MIN_SPLIT:
                    break
                tiles = max(1, gemm.batch * grid * parts)
                ramp = 1 + ramp_k * parts / gemm.k if gemm.k else 1.0
                found.append(padding * ramp * -(-tiles // self._sms) * self._sms / tiles)
                tile_of.append(index)
        waves: Matrix = (np.array(found)[None] / self._rates[:, tile_of, None]).min(axis=1)
        return waves.clip(1.0)


def _rounded(values: Matrix) -> tuple[float, ...]:
    return tuple(round(float(value), _DIGITS) for value in values)
