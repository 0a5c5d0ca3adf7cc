"""Exact search against brute force where modules disturb each other, in every form that it knows."""

from __future__ import annotations

from functools import partial

import pytest
from brute_force import plan_by_brute_force
from hypothesis import given
from hypothesis import strategies as st
from instance_cases import ROUNDING_MS, bounded, instances

from mosaic.cost import BandwidthInterference, Cost, MeasuredInterference
from mosaic.profile import PairSample, Phase
from mosaic.solver import solve
from mosaic.solver.instance import Instance, InstanceModule, InstanceOption, TableCost


@st.composite
def by_bandwidth(draw: st.DrawFn, instance: Instance) -> BandwidthInterference:
    """Any bandwidths, none at all and those that fall with slots among them."""
    share, count = st.one_of(st.just(0.0), st.floats(0, 1)), instance.num_slots
    keys = [(module.name, phase) for module in instance.modules for phase in Phase]
    shares = {key: draw(st.lists(share, min_size=count, max_size=count)) for key in keys}
    return BandwidthInterference(lambda module, phase, quota: shares[module, phase][quota - 1])


@st.composite
def measured(draw: st.DrawFn, instance: Instance) -> MeasuredInterference:
    """Pairs measured at several quotas: what they cost may well fall with slots; a pair may be unknown."""
    slowdowns = st.sampled_from([0.9, 1.0, 1.1, 1.5, 2.0])
    quota = st.integers(1, instance.num_slots)
    names = [module.name for module in instance.modules]
    samples = [
        PairSample(
            module=own,
            beside=other,
            phase=draw(st.sampled_from(list(Phase))),
            quota=draw(quota),
            beside_quota=draw(quota),
            times_ms=(draw(slowdowns),),
            alone_ms=(1.0,),
        )
        for own in names
        for other in names
        if own != other
        for _ in range(draw(st.sampled_from([0, 2, 4, 6])))
    ]
    return MeasuredInterference(samples)


@st.composite
def roomy(draw: st.DrawFn) -> Instance:
    """Modules at every quota of one degree, some of them no faster with more slots: these may be had to be milder."""
    num_slots = draw(st.integers(3, 6))
    made = []
    for name in "abc"[: draw(st.integers(2, 3))]:
        work, gain, memory = draw(st.integers(1, 20)), draw(st.sampled_from([0.0, 0.2, 1.0])), draw(st.integers(0, 6))
        options = tuple(
            InstanceOption(
                degree=1, quota=q, forward_ms=work / q**gain, backward_ms=work / q**gain, memory_bytes=memory
            )
            for q in range(1, num_slots + 1)
        )
        made.append(InstanceModule(name=name, options=options))
    return Instance(
        name="roomy",
        num_devices=draw(st.integers(1, 2)),
        num_slots=num_slots,
        memory_bytes=draw(st.sampled_from([0, 10])),
        modules=tuple(made),
    )


@st.composite
def disturbed(draw: st.DrawFn, form: str) -> tuple[Instance, Cost]:
    """Instances with memory, disturbed by a form instead of by their own pairs."""
    instance = draw(instances(most_modules=4, has_pairs=False) | roomy())
    cost: Cost = TableCost(instance)
    cost.interference = draw({"measured": measured, "bandwidth": by_bandwidth}[form](instance))
    return instance, cost


@pytest.mark.parametrize("form", ["measured", "bandwidth"])
@bounded(60)
@given(data=st.data())
def test_exact_agrees_with_brute_force_under_every_form(form, data):
    instance, cost = data.draw(disturbed(form))
    exact, truth = (
        plan(instance.graph, cost, instance.device, num_devices=instance.num_devices)
        for plan in (partial(solve, method="exact"), plan_by_brute_force)
    )
    assert exact.search.status == "optimal"
    assert exact.predicted_ms == pytest.approx(truth.predicted_ms, abs=ROUNDING_MS)
    assert exact.search.bound_ms == pytest.approx(truth.predicted_ms, abs=ROUNDING_MS)
