"""The description of a device: SMs and slots, peaks, memory, and the share of each peak that kernels reach."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from mosaic.artifact import StrictFile
from mosaic.device import Device

MAX_EFFICIENCY = 2.0
"""Largest efficiency; above 1 if caches serve counted memory traffic, or if a peak is a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency(StrictFile):
    """Shares of a peak that kernels of one kind reach: the alphas of PipeWeaver's SEMU (section 4.1).

    ``Hardware.kernel_us`` is the minimum time of a kernel. The defaults are round guesses; ``devices.toml`` has
    published figures of some devices.
    """

    matmul: float = 0.7
    """Matrix products, relative to the peak of their dtype."""
    attention: float = 0.5
    """Fused attention, relative to the peak of its dtype."""
    conv: float = 0.5
    """Convolutions, relative to the peak of their dtype."""
    memory: float = 0.8
    """Memory traffic, relative to the bandwidth, and all other arithmetic, relative to the vector units' peak."""
    network: float = 0.8
    """Collectives, relative to the links' bandwidth."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            _check_positive(f"efficiency.{entry.name}", getattr(self, entry.name), maximum=MAX_EFFICIENCY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(StrictFile):
    """A device by its vendor's figures.

    Raises:
        ValueError: A field is zero, negative, infinite or NaN; has its name.
    """

    schema_version: int = 1
    name: str
    """Short name, such as ``h100-80g``."""
    kind: Literal["host", "cuda"] = "cuda"
    """Backend that runs on it."""
    source: str
    num_sms: int
    """SMs; on the host, cores."""
    sms_per_slot: int = 1
    bf16_tflops: float
    """Dense peak of matrix products in bfloat16 or float16, in TFLOP/s."""
    tf32_tflops: float
    """Dense peak of convolutions in float32, which torch runs in TF32 by default."""
    fp32_tflops: float
    """Dense peak of matrix products in float32, and of vector operators."""
    fp64_tflops: float
    """Dense peak in float64."""
    memory_bytes: int
    memory_gb_per_s: float
    """Peak memory bandwidth, in GB/s."""
    sm_gb_per_s: float
    """Maximum bandwidth of one SM, in GB/s; it bounds a partition of few SMs."""
    launch_us: float
    """Time for one host thread to launch a kernel (on the host, to call an operator), in microseconds; a GPU works
    meanwhile."""
    kernel_us: float = 0.0
    """Minimum time of a kernel on a GPU, in microseconds."""
    host_gb_per_s: float = 0.0
    """Bandwidth to the host's memory in one direction, in GB/s; 0: no offloading."""
    lane_bytes: int = 0
    """Library workspaces of a lane's streams, in bytes."""
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        names = ("bf16_tflops", "tf32_tflops", "fp32_tflops", "fp64_tflops", "memory_gb_per_s", "sm_gb_per_s")
        for name in (*names, "num_sms", "sms_per_slot", "memory_bytes"):
            _check_positive(f"{self.name}: {name}", getattr(self, name))
        if self.sms_per_slot > self.num_sms:
            raise ValueError(f"{self.name}: sms_per_slot={self.sms_per_slot} exceeds num_sms={self.num_sms}")
        for name in ("launch_us", "kernel_us", "host_gb_per_s", "lane_bytes"):
            if not 0 <= getattr(self, name) < math.inf:  # also catches NaN
                raise ValueError(f"{self.name}: {name}={getattr(self, name)}; use a finite number, 0 or more")

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.num_sms // self.sms_per_slot

    def device(self) -> Device:
        """Returns the device for a planner."""
        return Device(
            name=self.name,
            kind=self.kind,
            num_slots=self.num_slots,
            sms_per_slot=self.sms_per_slot,
            remainder_sms=self.num_sms % self.sms_per_slot,
            memory_bytes=self.memory_bytes,
        )

    def peak_tflops(self, dtype: str, *, is_conv: bool = False) -> float:
        """Returns the peak of matrix products in a dtype, such as ``bfloat16``, in TFLOP/s.

        A dtype without a peak of its own (integers, float8) counts as 16 bits wide.
        """
        if dtype in ("float64", "complex128"):
            return self.fp64_tflops
        if dtype in ("float32", "complex64"):
            return self.tf32_tflops if is_conv else self.fp32_tflops
        return self.bf16_tflops

    def bandwidth_gb_per_s(self, num_sms: int) -> float:
        """Returns the maximum bandwidth of ``num_sms`` SMs, in GB/s."""
        return min(self.memory_gb_per_s, num_sms * self.sm_gb_per_s)


def _check_positive(name: str, value: float, *, maximum: float = math.inf) -> None:
    if not 0 < value <= maximum or value == math.inf:  # also catches NaN
        limit = "a finite number above 0" if maximum == math.inf else f"above 0 and at most {maximum:g}"
        raise ValueError(f"{name}={value}; use {limit}")
