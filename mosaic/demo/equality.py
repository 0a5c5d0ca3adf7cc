"""The proof that colocated training computes what plain training computes: bit for bit, with lanes that overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.demo.data import Batch
from mosaic.demo.loop import train
from mosaic.demo.model import TriModal
from mosaic.device import Device
from mosaic.engine import Handle
from mosaic.graph import ModuleGraph, Part
from mosaic.plan import Placement, Plan, SearchRecord, Stage


@dataclass(frozen=True, slots=True)
class Equality:
    """How two short trainings compare."""

    bitwise_equal: bool
    """Whether losses and parameters are equal, bit for bit."""
    max_abs_difference: float
    """Largest difference between parameters."""
    steps: int
    """Steps taken by each."""
    overlap: float
    """Share of lane time of the colocated one with another lane busy."""
    is_of_timed_plan: bool
    """Whether the colocated one ran by the plan of the handle that it was compared for."""


def compare(
    stream: Sequence[Batch], handle: Handle, *, seed: int, learning_rate: float, advance: Callable[[], None]
) -> Equality:
    """Trains twice from the same seed at one thread, plain and colocated, and compares.

    The colocated run has the handle's own plan. Its lanes have one thread each whatever their quotas, since with other
    thread counts the same sums are added up in another order. Where that plan runs nothing side by side, a comparison
    would prove nothing: then each module has one slot, on two at least.
    """
    plan, num_slots = handle.plan, handle.plan.device.num_slots
    is_of_timed_plan = handle.active and plan.is_colocated
    backend = HostBackend(num_slots if is_of_timed_plan else max(2, num_slots), num_threads=1)
    if not is_of_timed_plan:
        plan = one_slot_plan(handle.graph, backend.device)
    with _one_thread():
        plain_losses, plain, _ = _train(stream, seed, learning_rate, advance)
        losses, ours, overlap = _train(
            stream,
            seed,
            learning_rate,
            advance,
            lambda model: mosaic.colocate(model, sample=stream[0], plan=plan, backend=backend),
        )
    pairs = list(zip(plain.parameters(), ours.parameters(), strict=True))
    return Equality(
        bitwise_equal=losses == plain_losses and all(torch.equal(first, second) for first, second in pairs),
        max_abs_difference=max((first - second).abs().max().item() for first, second in pairs),
        steps=len(stream),
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


def _train(
    stream: Sequence[Batch],
    seed: int,
    learning_rate: float,
    advance: Callable[[], None],
    colocate: Callable[[TriModal], Handle] | None = None,
) -> tuple[list[float], TriModal, float]:
    torch.manual_seed(seed)
    model = TriModal()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    handle = colocate(model) if colocate is not None else None
    losses = []
    torch.manual_seed(seed)
    for batch in stream:
        losses += train(model, [batch], optimizer)
        advance()
    overlap = 0.0
    if handle is not None:
        overlap = handle.metrics()["overlap"]
        handle.remove()
    return losses, model, overlap


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
