"""Counted times, fitted to what steps took."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from pipeline_cases import images, two_encoders

from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.layers import Layer, ModuleFit, PhaseFit
from mosaic.pipelining.partition import Request
from mosaic.pipelining.schedule import TaskName
from mosaic.pipelining.task_graph import HostTimes, RankSpace, task_graph
from mosaic.pipelining.tasks import TaskGraph
from mosaic.ranks.pipeline.trying.fitting import (
    MAX_EXPONENT,
    FitStep,
    MeasuredTasks,
    fit_times,
    partition_to_fit,
    share_exponents,
)

STEP = images(2, 3, 6)
RIGHT = {
    "vision": ModuleFit(
        forward=PhaseFit(scale=2.0, layer_ms=0.5, first_ms=3.0),
        backward=PhaseFit(scale=1.5, layer_ms=0.25),
        weights=PhaseFit(scale=1.5, layer_ms=0.25),
    ),
    "audio": ModuleFit(forward=PhaseFit(layer_ms=2.0), backward=PhaseFit(scale=0.5), weights=PhaseFit(scale=0.5)),
    "text": ModuleFit(
        forward=PhaseFit(scale=3.0, last_ms=4.0), backward=PhaseFit(scale=2.0), weights=PhaseFit(scale=2.0)
    ),
}
HOST = HostTimes(task_ns=700_000)


@dataclass(frozen=True)
class Real:
    """A module whose layers take what is right, and not what was counted."""

    counted: object
    fit: ModuleFit

    def __getattr__(self, name: str):
        return getattr(self.counted, name)

    def layers(self, microbatch, units: int) -> tuple[Layer, ...]:
        return self.fit.layers(self.counted.layers(microbatch, units))


def request_of() -> Request:
    return Request(model=two_encoders(), num_ranks=2, microbatches=STEP)


def measured(graph: TaskGraph) -> MeasuredTasks:
    """What tasks would take by their own graph."""
    times = {str(TaskName.of(task)): task.time_ns for task in graph.tasks}
    return MeasuredTasks(start_ns=dict.fromkeys(times, 0), time_ns=times)


def fit_step(sizes: dict[str, int]) -> FitStep:
    request = request_of()
    partition = partition_to_fit(request, sizes)
    real = replace(request.model, modules=tuple(Real(one, RIGHT[one.name]) for one in request.model.modules))
    counted = task_graph(request.model, partition, STEP)
    taken = measured(task_graph(real, partition, STEP, RankSpace(host=HOST)))
    return FitStep(graph=counted, measured=[taken] * 2)


def test_what_tasks_take_is_found_again_for_other_pieces_and_cuts():
    names = [module.name for module in request_of().model.modules]
    steps = [fit_step({}), fit_step({"vision": 1})]
    fitted = fit_times(steps, names)
    assert fitted.host.task_ns == pytest.approx(HOST.task_ns, rel=0.02)
    model = request_of().model
    own = replace(model, modules=tuple(Real(one, fitted.modules[one.name]) for one in model.modules))
    right = replace(model, modules=tuple(Real(one, RIGHT[one.name]) for one in model.modules))
    partition = partition_to_fit(replace(request_of(), num_ranks=3), {"vision": 2})
    graphs = [
        task_graph(one, partition, images(4, 5), RankSpace(host=HostTimes(task_ns=task_ns)))
        for one, task_ns in ((own, fitted.host.task_ns), (right, HOST.task_ns))
    ]
    times = [[task.time_ns for task in graph.tasks] for graph in graphs]
    assert times[0] == pytest.approx(times[1], rel=0.03)


class OnLanes(Real):
    """A module whose speed on a share of a rank is a power of the share."""

    def on_share(self, share: float) -> OnLanes:
        return replace(self, fit=self.fit.slower(share**-0.25))


def test_one_step_on_lanes_says_what_a_share_of_a_rank_is_to_each_module():
    partition = partition_by("lanes", request_of())
    model = two_encoders()
    real = replace(model, modules=tuple(OnLanes(one, ModuleFit()) for one in model.modules))
    counted, taken = (task_graph(one, partition, STEP) for one in (model, real))
    disturbed = measured(taken)
    disturbed.time_ns = {name: 3 * time for name, time in disturbed.time_ns.items()}
    found = share_exponents(counted, partition, [disturbed, measured(taken)])
    assert found == pytest.approx({"vision": 0.25}, abs=1e-5)  # the text model has its rank, and nobody speaks
    slow = replace(real, modules=tuple(OnLanes(one, ModuleFit().slower(50.0)) for one in model.modules))
    assert share_exponents(counted, partition, [measured(task_graph(slow, partition, STEP))])["vision"] == MAX_EXPONENT
