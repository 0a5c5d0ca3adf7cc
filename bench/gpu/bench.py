"""The context of a measurement: backend, settings, time limit, and earlier results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from bench.record import Figure
from mosaic.backends.base import Backend
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.host.backend import HostBackend
from mosaic.device import Device
from mosaic.microbench import BenchSettings, Budget

if TYPE_CHECKING:
    from bench.gpu.child import Order


@dataclass
class Bench:
    backend: Backend
    budget: Budget
    """Time limit, checked before each piece."""
    dry_run: bool
    known: tuple[Figure, ...] = ()
    notes: list[str] = field(default_factory=list)
    """Notes about the figures, appended by a measurement."""
    driver_version: str = ""
    """Set by the measurement."""
    verdict: str = ""
    """The conclusion of the measurement, if any."""

    @property
    def device(self) -> Device:
        return self.backend.device

    @property
    def torch_device(self) -> torch.device:
        return self.backend.torch_device

    @property
    def on_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    def settings(self, *, grid: int = 8, repeats: int = 15, rounds: int = 6) -> BenchSettings:
        """Returns settings for measurements of a few seconds."""
        if self.dry_run:
            return BenchSettings.tiny()
        fitting = BenchSettings.fit(self.backend)
        return replace(
            fitting, grid=grid, repeats=repeats, rounds=rounds, sample_ms=40.0, together_ms=30.0, lends=20_000
        )

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.torch_device)

    def value_of(self, part: str, name: str) -> float | None:
        """Returns a number of an earlier measurement, or None."""
        return next((f.value for f in self.known if (f.part, f.name) == (part, name)), None)


def open_bench(order: Order) -> Bench:
    """Opens a GPU's backend, or the host's, for a measurement."""
    return Bench(
        backend=HostBackend(num_slots=2) if order.on_host else CudaBackend(order.ordinal),
        budget=Budget(order.seconds),
        dry_run=order.dry_run,
        known=order.known,
    )
