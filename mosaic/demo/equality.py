"""The check that colocated training equals plain training, with overlapping lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import mosaic
from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend
from mosaic.demo.data import DigitTriples
from mosaic.demo.loop import DemoSettings, train_step
from mosaic.device import Device
from mosaic.engine import Handle
from mosaic.graph import ModuleGraph, Part
from mosaic.plan import Placement, Plan, SearchRecord, Stage

TOLERANCES = {"host": 0.0, "cuda": 1e-4}
"""Largest difference of values that count as equal, by the kind of the device; relative for values above 1.

On the host the bits are equal. On a GPU a library may choose another kernel on fewer SMs, and some kernels add up in an
order that varies."""


@dataclass(frozen=True, slots=True)
class Equality:
    """Comparison of two short trainings."""

    max_abs_difference: float
    """Largest difference between losses or parameters; relative for values above 1."""
    tolerance: float
    """Largest difference that counts as equal; 0 for equal bits."""
    steps: int
    """Steps of each training."""
    overlap: float
    """Share of lane time with another lane busy, in the colocated training."""
    is_of_timed_plan: bool
    """True if the colocated training ran by the handle's plan."""


def compare(
    settings: DemoSettings, data: DigitTriples, handle: Handle, backend: Backend, advance: Callable[[], None]
) -> Equality:
    """Trains twice from the same seed, plain and colocated, and compares.

    The colocated training uses the handle's plan. If that plan runs no modules side by side, a comparison proves
    nothing: then each module gets one slot. On the host every lane has one thread, because other thread counts add
    the same sums in another order.
    """
    plan = handle.plan
    is_of_timed_plan = handle.active and plan.is_colocated
    if backend.device.kind == "host":
        num_slots = plan.device.num_slots
        backend = HostBackend(num_slots if is_of_timed_plan else max(2, num_slots), num_threads=1)
    if not is_of_timed_plan:
        plan = one_slot_plan(handle.graph, backend.device)

    def train(plan: Plan | None) -> tuple[list[Tensor], float]:
        model = settings.make_model(backend.torch_device)
        stream = settings.draw(data, settings.equality_steps, backend.torch_device)
        # Keys of attention have biases whose gradients are rounding alone; a large eps keeps AdamW from following it.
        optimizer = torch.optim.AdamW(model.parameters(), settings.size.learning_rate, eps=1e-4)
        ours = None if plan is None else mosaic.colocate(model, sample=stream[0], plan=plan, backend=backend)
        torch.manual_seed(settings.seed)
        losses, overlap = [], 0.0
        for batch in stream:
            losses.append(train_step(model, batch, optimizer))
            advance()
        if ours is not None:
            overlap = ours.metrics()["overlap"]
            ours.remove()
        return [torch.tensor(losses, dtype=torch.float64), *(p.detach() for p in model.parameters())], overlap

    with _reproducible():
        expected, _ = train(None)
        actual, overlap = train(plan)
    differences = [
        ((ours - plain).abs() / plain.abs().clamp(min=1)).max().double().cpu()
        for ours, plain in zip(actual, expected, strict=True)
    ]
    return Equality(
        max_abs_difference=torch.stack(differences).max().item(),
        tolerance=TOLERANCES[backend.device.kind],
        steps=settings.equality_steps,
        overlap=overlap,
        is_of_timed_plan=is_of_timed_plan,
    )


def one_slot_plan(graph: ModuleGraph, device: Device) -> Plan:
    """Places every module on one slot, side by side as far as slots go and dependencies allow."""
    stages: list[list[Placement]] = []
    level: dict[str, int] = {}
    for name in graph.topological_order():
        first = max((level[source] + 1 for source in graph.predecessors(name)), default=0)
        while first < len(stages) and len(stages[first]) == device.num_slots:
            first += 1
        if first == len(stages):
            stages.append([])
        stages[first].append(Placement(part=Part(module=name), slots=(len(stages[first]),)))
        level[name] = first
    return Plan(
        device=device,
        stages=tuple(Stage(placements=tuple(placements)) for placements in stages),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )


@contextmanager
def _reproducible() -> Iterator[None]:
    """One thread, and cuDNN in full float32 by algorithms that add up in one order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_num_threads(num_threads)
