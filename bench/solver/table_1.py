"""Modules of the paper's Table 1, and a made-up H100 that says what they take at each degree and quota.

What the table's operations are of, and what the zoo's models do beside them: ``zoo_ratios.py``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.cost.communication import gradient_sum
from mosaic.hardware import find_cluster
from mosaic.solver.instance import Disturbance, InstanceOption


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A row of Table 1."""

    name: str
    """Model and module."""
    layers: int
    """Layers."""
    width: int
    """Hidden dimension."""
    tera_flops: float
    """The column of that name, in 10^12; the made-up H100 takes it for one sample's forward."""
    intensity: float
    """Operations for each byte moved."""


def _kind(name: str, layers: int, width: int, tera_flops: float, intensity: float) -> Kind:
    return Kind(name=name, layers=layers, width=width, tera_flops=tera_flops, intensity=intensity)


BACKBONES = (
    _kind("qwen3vl_llm", 36, 4096, 22.27, 145.2),
    _kind("uio2_llm", 48, 3072, 16.70, 110.5),
    _kind("ofasys_llm", 36, 1280, 4.80, 41.6),
)
ENCODERS = (
    _kind("qwen3vl_vision", 27, 4096, 2.58, 82.4),
    _kind("qwen3vl_text", 1, 4096, 0.15, 2.1),
    _kind("uio2_vision", 11, 768, 1.48, 24.6),
    _kind("uio2_audio", 11, 768, 1.06, 21.8),
    _kind("uio2_text", 1, 3072, 0.10, 4.5),
    _kind("imagebind_vision", 24, 1024, 4.17, 35.2),
    _kind("imagebind_audio", 12, 768, 2.09, 22.8),
    _kind("imagebind_text", 12, 768, 1.04, 20.5),
    _kind("ofasys_vision", 8, 1280, 1.35, 18.2),
    _kind("ofasys_text", 4, 1280, 0.72, 12.5),
    _kind("ofasys_audio", 6, 1280, 0.95, 14.8),
)
"""Every row of the table; it has none of CLIP and CTVLM."""

BATCH = 32
PEAK_TERA_FLOPS = 500.0
"""What dense bf16 layers reach on a whole H100."""
PEAK_TERA_BYTES = 3.0
BANDWIDTH_KNEE = 0.6
"""Share of the SMs that draws all of the memory bandwidth."""
CACHE = 4.0
"""Bytes in Table 1 count every operand; this many of them come out of caches for each one that does not."""
KEPT_SHARE = 0.75
"""Of a module's activations, what stays from forward to backward; the rest is workspace."""
LAUNCH_MS = 0.06
"""Least time of a layer, however small."""
POD = find_cluster("h100-80g", 32)
"""Where gradients are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnModule:
    """A kind with its own amount of work."""

    name: str
    """Name in the instance."""
    kind: Kind
    """What it is like."""
    scale: float
    """Work over that of its kind."""
    backward: float
    """Backward over forward: 2, or 1 where the module's own weights are frozen."""
    blocks_per_sample: int
    """Thread blocks that one sample fills; few of them waste SMs."""


def draw_module(kind: Kind, name: str, draw: random.Random) -> DrawnModule:
    """Draws a module: its work log-normal around its kind's, one in six frozen."""
    return DrawnModule(
        name=name,
        kind=kind,
        scale=math.exp(draw.gauss(0.0, 0.4)),
        backward=1.0 if draw.random() < 1 / 6 else 2.0,
        blocks_per_sample=max(4, round(kind.width / 32 * draw.uniform(0.5, 2.0))),
    )


def tabulate(
    module: DrawnModule, degrees: Sequence[int], num_slots: int, *, held: bool = False
) -> tuple[InstanceOption, ...]:
    """Returns an option for every degree and quota, in whole nanoseconds; ``held``: with what it keeps."""
    options = []
    for degree in degrees:
        memory, resident = _memory_bytes(module, degree), round(_state_bytes(module, degree))
        for quota in range(1, num_slots + 1):
            forward_ms = _compute_ms(module, degree, quota / num_slots)
            backward_ms = forward_ms * module.backward + _reduce_ms(module, degree)
            options.append(
                InstanceOption(
                    degree=degree,
                    quota=quota,
                    forward_ms=round(forward_ms, 6),
                    backward_ms=round(backward_ms, 6),
                    memory_bytes=memory,
                    resident_bytes=resident if held else 0,
                    activation_bytes=round((memory - resident) * KEPT_SHARE) if held else 0,
                )
            )
    return tuple(options)


def disturb(modules: Sequence[DrawnModule]) -> tuple[Disturbance, ...]:
    """Two modules slow each other down by the product of the shares of bandwidth that they draw."""
    drawn = {module.name: _bandwidth(module) for module in modules}
    return tuple(
        Disturbance(module=own, beside=other, forward=round(cost, 4), backward=round(1.2 * cost, 4))
        for own in drawn
        for other in drawn
        if own != other and (cost := 0.5 * drawn[own] * drawn[other]) >= 0.005
    )


def _samples(degree: int) -> int:
    return -(-BATCH // degree)


def _compute_ms(module: DrawnModule, degree: int, share: float) -> float:
    """The roofline of one forward on one device's share, in waves of whole blocks, and never below its launches."""
    blocks = _samples(degree) * module.blocks_per_sample
    sms = max(1, round(132 * share))
    waste = -(-blocks // sms) * sms / blocks
    work = _samples(degree) * module.kind.tera_flops * module.scale
    math_ms = work / (PEAK_TERA_FLOPS * share) * waste * 1e3
    moved = work / module.kind.intensity / CACHE
    copy_ms = moved / (PEAK_TERA_BYTES * min(1.0, share / BANDWIDTH_KNEE)) * 1e3
    return max(math_ms, copy_ms) + LAUNCH_MS * module.kind.layers


def _bandwidth(module: DrawnModule) -> float:
    """Share of a device's bandwidth that the module draws with all of its SMs."""
    moved_ms = module.kind.tera_flops / module.kind.intensity / CACHE / PEAK_TERA_BYTES
    return moved_ms / max(moved_ms, module.kind.tera_flops / PEAK_TERA_FLOPS)


def _parameters(module: DrawnModule) -> float:
    return 12.0 * module.kind.layers * module.kind.width**2


def _reduce_ms(module: DrawnModule, degree: int) -> float:
    """Half of the sum of bf16 gradients; the other half hides behind backward."""
    return gradient_sum(round(2 * _parameters(module)), degree, POD).time_ms / 2


def _state_bytes(module: DrawnModule, degree: int) -> float:
    """Weights, gradients and optimizer (ZeRO-sharded)."""
    return _parameters(module) * (4.0 + 12.0 / degree)


def _memory_bytes(module: DrawnModule, degree: int) -> int:
    """State, and activations of its share of the batch."""
    return round(_state_bytes(module, degree) + 34.0 * 512 * module.kind.layers * module.kind.width * _samples(degree))
