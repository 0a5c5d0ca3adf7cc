"""Counted times, fitted to what steps took."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from pipeline_cases import images, two_encoders

from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.plan import FittedTimes, HostTimes
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import TaskGraph
from mosaic.pipelining.workload.counted import CountedLayers, CountedMicrobatch, CountedModule, ModuleFit, PhaseFit
from mosaic.pipelining.workload.layers import Layer, PipelineModel, Strategy
from mosaic.ranks.pipeline.trying.fitting import (
    MAX_EXPONENT,
    FitStep,
    MeasuredTasks,
    fit_above_zero,
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
    taken = measured(task_graph(real, partition, STEP, host=HOST))
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
        task_graph(one, partition, images(4, 5), host=HostTimes(task_ns=task_ns))
        for one, task_ns in ((own, fitted.host.task_ns), (right, HOST.task_ns))
    ]
    times = [[task.time_ns for task in graph.tasks] for graph in graphs]
    assert times[0] == pytest.approx(times[1], rel=0.03)


def test_messages_say_what_posting_them_and_their_way_take():
    step = fit_step({})
    edge = next(wait for wait in step.graph.waits if step.graph.tasks[wait.source].row == 0)
    ends = (str(TaskName.of(step.graph.tasks[at])) for at in (edge.source, edge.target))
    name = ">".join(ends)
    spans = {
        f"SEND({name})": (100, 200_100),
        f"SENT({name})": (900_000, 950_000),
        f"RECV({name})": (0, 50_000),
        f"GOT({name})": (50_000, 500_100),
    }
    both = [replace_spans(one, spans) for one in step.measured]
    found = fit_times([replace(step, measured=both)], [module.name for module in request_of().model.modules]).host
    assert found.post_ns == 150_000
    assert found.message_ns == 300_000


def replace_spans(one: MeasuredTasks, spans: dict[str, tuple[int, int]]) -> MeasuredTasks:
    return MeasuredTasks(start_ns=one.start_ns, time_ns=one.time_ns, spans=spans)


def test_a_partition_to_fit_has_tasks_of_one_layer_and_of_many():
    partition = partition_to_fit(request_of(), {})
    partition.check_covers(request_of().model)
    assert all(len(chunk.parts) == 1 for chunk in partition.chunks)
    assert {chunk.rank for chunk in partition.chunks} == {0, 1}


def test_coefficients_are_never_below_zero_and_the_first_of_equal_columns_is_used():
    rows = [[one, one, 1.0] for one in (1.0, 2.0, 4.0)]
    assert fit_above_zero(np.array(rows), np.array([1.0, 3.0, 7.0])) == pytest.approx(
        [7 / (1 + 4 / 3 + 16 / 7), 0.0, 0.0]
    )


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


def test_a_counted_module_on_a_share_takes_a_power_of_it():
    module = CountedModule(
        name="vision", trains=(True,), parameters=(1,), resident_bytes=(4,), fit=ModuleFit().slower(2.0)
    )
    layer = Layer(forward_ms=1.0, backward_ms=2.0, weights_ms=3.0, strategies=(Strategy(name="keep", kept_bytes=0),))
    counted = {"vision": CountedLayers(units=1, layers=(layer,), boundary_bytes=4)}
    step = CountedMicrobatch(text_tokens=1, key="", counted=counted)
    for exponent, slower in ((1.0, 4.0), (0.5, 2.0), (0.0, 1.0)):
        (found,) = replace(module, share_exponent=exponent).on_share(0.25).layers(step, 1)
        assert (found.forward_ms, found.backward_ms, found.weights_ms) == (2 * slower, 4 * slower, 6 * slower)
    kept = FittedTimes.of([replace(module, share_exponent=0.5)], HOST)
    assert kept.share_exponents == {"vision": 0.5}
    (again,) = kept.model(PipelineModel(modules=(module,), feeds=())).modules
    assert again == replace(module, share_exponent=0.5)
