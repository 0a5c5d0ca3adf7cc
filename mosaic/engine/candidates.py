"""The candidates of a trial: plans to try, the comparison of their numbers with the plain loop's, and clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mosaic.cost import Cost
from mosaic.engine.placing import PlacedPlan
from mosaic.errors import InfeasibleError
from mosaic.find.restore import preserved
from mosaic.find.structure import tensors_in
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profiler import Subject
from mosaic.solver import solve
from mosaic.solver.exact import why_not_exact
from mosaic.solver.limits import SearchLimits
from mosaic.solver.task import SearchOptions
from mosaic.take_turns import StepClock

if TYPE_CHECKING:
    from mosaic.backends.base import Backend
    from mosaic.backends.streams.api import StreamApi

_EFFORT = 1.0
"""Most effort of the search for another plan."""
_COMPARED_STEPS = 2


@dataclass(slots=True)
class PlanCandidate:
    plan: Plan
    graphs: bool = False
    """True if its modules are launched as CUDA graphs."""
    sm_target: bool = False
    """True if libraries get the SM counts of its lanes."""
    is_variant: bool = False
    """True if another candidate has the same plan."""
    placed: PlacedPlan | None = None
    """Its lanes while they are open."""
    num_errors: int = 0
    """Calls of the model that raised under it."""

    @property
    def name(self) -> str:
        graphs, target = ", as CUDA graphs" if self.graphs else "", ", with SM targets" if self.sm_target else ""
        return f"{name_of(self.plan)}{graphs}{target}"

    def close(self) -> None:
        if self.placed is not None:
            self.placed.close()
            self.placed = None


def plan_shape(plan: Plan) -> Hashable:
    """Returns what decides how a plan runs: its stages, and the slots of each module."""
    return tuple(tuple((p.module, p.cells) for p in stage.placements) for stage in plan.stages)


def name_of(plan: Plan) -> str:
    """Names the modules that run side by side with their quotas, stage after stage."""
    if not plan.is_colocated:
        quotas = ", ".join(f"{p.module}:{p.quota}" for p in plan.placements)
        return f"one module after the other on lanes ({quotas})"
    return " | ".join(" + ".join(f"{p.module}:{p.quota}" for p in stage.placements) for stage in plan.stages)


def plans_to_try(best: Plan, graph: ModuleGraph, cost: Cost, *, count: int, smallest_gain: float) -> tuple[Plan, ...]:
    """Returns the best plan, the next best that have other stages, and the sequential one last; all different.

    Of each colocated stage of the best plan there is one candidate without it. Plans whose predicted speed-up is below
    ``smallest_gain`` are left out, except for the sequential one; if that leaves none, there is nothing to try.
    """
    if best.predicted_speedup < smallest_gain:
        return ()
    device, others = best.device, []
    if why_not_exact(graph, cost) is None and count > 2:
        for stage in best.stages:
            if len(stage.placements) > 1:
                with suppress(InfeasibleError):  # there is no plan without this stage
                    search = SearchOptions(limits=SearchLimits(effort=_EFFORT))
                    others.append(solve(graph, cost, device, method="exact", search=search, forbidden=[stage.names]))
    others = [plan for plan in others if plan.predicted_speedup >= smallest_gain]
    chosen: dict[Hashable, Plan] = {}
    for plan in (best, *sorted(others, key=lambda plan: plan.predicted_ms)):
        chosen.setdefault(plan_shape(plan), plan)
    plans = list(chosen.values())[: max(1, count - 1)]
    return (*plans, solve(graph, cost, device, method="sequential"))[:count]


# The same numbers.


def sample_step(run: Callable[[], Any]) -> tuple[torch.Tensor, ...]:
    """Runs a model once, forward and backward of the sum of its results; returns the results."""
    with torch.enable_grad():
        results = tensors_in(run())
        outputs = [tensor for tensor in results if tensor.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return tuple(results)


class SampleComparison:
    """Compares losses and gradients of the sample's step with those of the plain loop; nothing trains.

    The plain loop runs twice, on the host the second time with half of the threads, which shows the rounding error
    of the model. A candidate may differ by ten times as much.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any], sample: Any, subjects: Sequence[Subject]) -> None:
        self._model = model
        self._run = run
        self._sample = sample
        self._subjects = subjects
        self._expected = self._numbers()
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // 2))
        try:
            noise = max((error for _, error in self._errors(self._numbers())), default=0.0)
            noise = noise if math.isfinite(noise) else math.inf  # nothing can be compared
        finally:
            torch.set_num_threads(threads)
        coarsest = max((torch.finfo(of.dtype).eps for of in self._expected.values()), default=0.0)
        self._limit = max(10 * noise, math.sqrt(coarsest))

    def difference(self) -> str | None:
        """Runs the step twice and returns how its numbers differ from the plain loop's; None if they do not.

        The first call of a module is made in place, and the second one on its lane.
        """
        for _ in range(_COMPARED_STEPS):
            name, error = max(self._errors(self._numbers()), key=lambda pair: pair[1], default=("", 0.0))
            if not error <= self._limit:
                return f"on the sample its {name} differs from the plain loop's by {error:.1e} of its size"
        return None

    def _numbers(self) -> dict[str, torch.Tensor]:
        with preserved(self._model, self._sample, alone=self._subjects, elsewhere=True):
            results = sample_step(self._run)
            numbers = {f"result {index}": tensor for index, tensor in enumerate(results)}
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    numbers[f"gradient of {name}"] = parameter.grad
            return {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in numbers.items()
                if tensor.is_floating_point() and tensor.layout is torch.strided
            }

    def _errors(self, numbers: Mapping[str, torch.Tensor]) -> list[tuple[str, float]]:
        if numbers.keys() != self._expected.keys():
            return [(sorted(numbers.keys() ^ self._expected.keys())[0], math.inf)]
        largest = max((_norm(tensor) for tensor in self._expected.values()), default=0.0)
        return [
            (name, _distance(numbers[name], expected) / max(_norm(expected), 1e-3 * largest, 1e-30))
            for name, expected in self._expected.items()
        ]


def _distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference; infinite where the shapes differ, or one has NaN or infinities of its own."""
    if tensor.shape != expected.shape:
        return math.inf
    is_same = (tensor == expected) | (tensor.isnan() & expected.isnan())
    norm = float(torch.linalg.vector_norm((tensor.double() - expected.double()).masked_fill(is_same, 0.0)))
    return norm if math.isfinite(norm) else math.inf


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)))


# Clocks.


class HostClock:
    """The processor's clock: launched work is done."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def is_past(self, mark: int) -> bool:
        return True

    def ms_between(self, earlier: int, later: int) -> float:
        return (later - earlier) / 1e6

    def settle(self) -> None:
        """Does nothing: the lanes are idle at a mark."""


class EventClock:
    """Timed events on the caller's stream, one a step.

    The time between two is the device's, or the launching thread's where that is slower; no step waits for it.
    """

    def __init__(self, api: StreamApi) -> None:
        self._api = api

    def mark(self) -> Any:
        event = self._api.new_event(timing=True)
        event.record(self._api.current_stream())
        return event

    def is_past(self, mark: Any) -> bool:
        passed: bool = mark.query()
        return passed

    def ms_between(self, earlier: Any, later: Any) -> float:
        earlier.synchronize()
        later.synchronize()
        took: float = earlier.elapsed_time(later)
        return took

    def settle(self) -> None:
        self._api.synchronize()


def clock_of(backend: Backend) -> StepClock:
    return HostClock() if backend.api is None else EventClock(backend.api)
