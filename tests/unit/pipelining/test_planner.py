"""The planner of a step: within its bound, memory and contenders; shares of replicas."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.schedule_checker import check_pipeline_schedule
from pipeline_cases import Plain, models, steps
from pipeline_oracle import simulated

from bench.papers.data_sets import Microbatch
from mosaic.errors import InfeasibleError
from mosaic.pipelining.layers import Feed, PipelineModel
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import PlannerOptions, contend, plan_step
from mosaic.pipelining.task_graph import RankSpace


@settings(max_examples=30, deadline=None)
@given(models(min_layers=4), steps(), st.integers(1, 3), st.floats(0, 1), st.booleans())
def test_a_step_planned_for_short_memory_fits_it_and_no_contender_is_shorter(
    model, microbatches, ranks, share, is_instant
):
    if is_instant:  # first layers take no time, and memory all the same
        instant = (replace(module, unit_ms=(0.0, *module.unit_ms[1:])) for module in model.modules)
        model = replace(model, modules=tuple(instant))
    request = Request(model=model, num_ranks=ranks, microbatches=microbatches)
    options = PlannerOptions(limits=OrderLimits(rollouts=200))
    free = plan_step(request, microbatches, options=options)
    natural = plan_step(request, microbatches, options=replace(options, method="natural"))
    assert free.bound_ns <= free.makespan_ns <= natural.makespan_ns
    base, most = max(free.graph.base_bytes), max(free.timed.peak_bytes)
    space = RankSpace(limit_bytes=base + round(share * (most - base)))
    contenders = contend(request, microbatches, space=space, names=("gpipe", "1f1b"))
    try:
        planned = plan_step(request, microbatches, space=space, options=options, contenders=contenders)
    except InfeasibleError:
        assert all(isinstance(one, str) for one in contenders.values())
        return
    assert planned.bound_ns <= planned.makespan_ns
    assert all(isinstance(one, str) or planned.makespan_ns <= one.makespan_ns for one in contenders.values())
    assert simulated(planned.graph, planned.orders) == replace(planned.timed, start_ns=list(planned.timed.start_ns))
    assert max(planned.timed.peak_bytes) <= space.limit_bytes
    timed = check_pipeline_schedule(planned.schedule(), planned.graph, training=planned.training)
    assert timed.makespan_ns >= planned.makespan_ns


def test_a_baseline_whose_rank_holds_more_than_its_limit_all_the_time_does_not_fit():
    """No task of the rank would wait for memory: the step has no images."""
    modules = (
        Plain(name="vision", unit_ms=(0.25,) * 6, trains=(True, True, False, False, True, False)),
        Plain(name="text", unit_ms=(0.25,) * 4, trains=(False,) * 4, counts="all"),
    )
    model = PipelineModel(modules=modules, feeds=(Feed(source="vision", target="text"),))
    microbatches = (Microbatch(text_tokens=1, images=0, audio_s=0.0),)
    request = Request(model=model, num_ranks=2, microbatches=microbatches)
    fits, short = (
        contend(request, microbatches, space=RankSpace(limit_bytes=limit), names=("1f1b",))["1f1b"]
        for limit in (26, 25)
    )
    assert not isinstance(fits, str)
    assert fits.timed.peak_bytes[0] == 26
    assert isinstance(short, str)
