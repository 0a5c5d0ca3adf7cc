"""Every measurement of ``bench.gpu`` in order of worth: a run that is cut short has the most important ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.gpu_bench import Bench, Measurement
from bench.gpu_models import model_measurements
from bench.gpu_questions import measure_question
from bench.roofline import measure_ceilings
from mosaic.backends.host import HostBackend
from mosaic.microbench import Budget
from mosaic.microbench.devices import open_backend

if TYPE_CHECKING:
    from bench.gpu_child import Order

_BY_BATCH = model_measurements()

_IN_ORDER = (
    Measurement("ceilings", "what can the device do at most?", measure_ceilings, 8),
    Measurement(
        "overlap", "what part of a gain comes from quotas, and what from concurrency?", measure_question("overlap"), 30
    ),
    *_BY_BATCH,
)

MEASUREMENTS = {measurement.name: measurement for measurement in _IN_ORDER}
"""By name, in order of worth."""


def open_bench(order: Order) -> Bench:
    """Opens the backend that an order asks for."""
    backend = HostBackend(num_slots=2) if order.dry_run else open_backend("cuda", order.ordinal)
    return Bench(backend=backend, budget=Budget(order.seconds), dry_run=order.dry_run, known=order.known)
