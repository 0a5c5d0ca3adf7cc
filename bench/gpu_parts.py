"""Every measurement of ``bench.gpu`` in order of worth: a run that is cut short has the most important ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import gpu_unknowns as unknowns
from bench.gpu_bench import Bench, Measurement
from bench.gpu_counters import measure_counters
from bench.gpu_models import model_measurements
from bench.gpu_questions import measure_question
from bench.roofline import measure_ceilings
from mosaic.backends.host import HostBackend
from mosaic.microbench import Budget
from mosaic.microbench.devices import open_backend

if TYPE_CHECKING:
    from bench.gpu_child import Order

_OVERLAP = "what part of a gain comes from quotas, and what from concurrency?"
_MODELS = model_measurements()
_FIRST_MODELS = tuple(model for model in _MODELS if model.name.endswith("/8"))

_IN_ORDER = (
    Measurement("device", "what is the device, and into how many slots is it cut?", unknowns.measure_device, 2),
    Measurement("ceilings", "what can the device do at most?", measure_ceilings, 5),
    Measurement("overlap", _OVERLAP, measure_question("overlap"), 30),
    Measurement("pool", "what does it cost to make contexts, and to lend them?", measure_question("pool", grid=4), 15),
    *_FIRST_MODELS,
    Measurement("isolation", "does work stay in its partition?", measure_question("isolation", grid=4), 12),
    Measurement("scaling", "how much time does work take at every quota?", measure_question("scaling", grid=16), 25),
    Measurement(
        "unknowns/sm-target", "do matrix products see how small their partition is?", unknowns.measure_sm_target, 8
    ),
    Measurement(
        "unknowns/outside-backward",
        "where does a backward run that is started outside of its lane?",
        unknowns.measure_outside_backward,
        3,
    ),
    Measurement("unknowns/counters", "can GPM be read, and by whom?", measure_counters, 4),
    *(model for model in _MODELS if model.name.endswith("/2")),
    *(
        Measurement(
            f"unknowns/connections-{count}",
            f"do two modules overlap with {count} hardware queues?",
            unknowns.measure_connections,
            6,
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": str(count)},
        )
        for count in (8, 32)
    ),
    Measurement(
        "unknowns/placements", "does it matter how unequal partitions are cut?", unknowns.measure_placements, 6
    ),
    Measurement("interference", "what do kernels cost each other?", measure_question("interference", grid=4), 25),
    Measurement("unknowns/small-collective", "does NCCL work in 8 SMs?", unknowns.measure_small_collective, 5),
    *(model for model in _MODELS if model.name.endswith("/4")),
)

MEASUREMENTS = {measurement.name: measurement for measurement in _IN_ORDER}
"""By name, in order of worth."""


def open_bench(order: Order) -> Bench:
    """Opens the backend that an order asks for."""
    backend = HostBackend(num_slots=2) if order.dry_run else open_backend("cuda", order.ordinal)
    return Bench(backend=backend, budget=Budget(order.seconds), dry_run=order.dry_run, known=order.known)
