"""Exact search against brute force where modules disturb each other, in every form that it knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
from brute_force import plan_by_brute_force
from hypothesis import given
from hypothesis import strategies as st
from instance_cases import ROUNDING_MS, bounded, instances

from mosaic.cost import (
    Cost,
    Eq8,
    Eq8Interference,
    Interference,
    MeasuredInterference,
    PairwiseInterference,
    Sharing,
)
from mosaic.profile import PairSample, Phase
from mosaic.solver import solve
from mosaic.solver.exact import why_not_exact
from mosaic.solver.instance import Instance, InstanceModule, InstanceOption, TableCost


@dataclass(frozen=True)
class Drawn:
    """Bandwidths by module, phase and quota."""

    shares: dict[tuple[str, Phase], Sequence[float]]

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        return self.shares[module, phase][quota - 1]


@st.composite
def bandwidths(draw: st.DrawFn, instance: Instance) -> Drawn:
    """Any that do not fall with slots, none at all among them."""
    count = instance.num_slots
    share = st.one_of(st.just(0.0), st.floats(0, 1))
    keys = [(module.name, phase) for module in instance.modules for phase in Phase]
    shares = {key: sorted(draw(st.lists(share, min_size=count, max_size=count))) for key in keys}
    return Drawn(shares)


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


def phases(of: st.SearchStrategy) -> st.SearchStrategy:
    """Coefficients of one phase or of both."""
    return st.dictionaries(st.sampled_from(list(Phase)), of, min_size=1)


@st.composite
def by_equation_8(draw: st.DrawFn, instance: Instance) -> Eq8Interference:
    weight = st.floats(0, 20)
    forms = st.builds(Eq8, e1=st.floats(-10, 10), e2=weight, e3=st.just(0.0) | weight)
    return Eq8Interference(draw(phases(forms)), draw(bandwidths(instance)))


@st.composite
def by_bandwidth(draw: st.DrawFn, instance: Instance) -> PairwiseInterference:
    weight = st.floats(0, 4)
    return PairwiseInterference(
        draw(phases(st.builds(Sharing, pressure=weight, product=weight))), draw(bandwidths(instance))
    )


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
    """Instances with memory and pins, disturbed by a form instead of by their own pairs."""
    instance = draw(instances(most_modules=4, has_pairs=False) | roomy())
    cost: Cost = TableCost(instance)
    forms = {"measured": measured, "eq8": by_equation_8, "pairwise": by_bandwidth}
    cost.interference = draw(forms[form](instance))
    return instance, cost


@pytest.mark.parametrize("form", ["measured", "eq8", "pairwise"])
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


@bounded(30)
@given(made=disturbed("eq8"), data=st.data())
def test_a_search_is_only_asked_where_no_module_draws_less_with_more_slots(made, data):
    instance, cost = made
    form: Interference = cost.interference
    assert isinstance(form, Eq8Interference)
    assert why_not_exact(instance.graph, cost) is None
    phase = data.draw(st.sampled_from(sorted(form.coefficients)))
    wide = [m for m in instance.modules if len({option.quota for option in m.allowed}) > 1]
    if not wide or form.is_zero:
        return
    name = data.draw(st.sampled_from([module.name for module in wide]))
    quotas = [1.0 - 0.1 * slot for slot in range(instance.num_slots)]
    old = data.draw(bandwidths(instance))
    cost.interference = Eq8Interference(form.coefficients, replace(old, shares={**old.shares, (name, phase): quotas}))
    assert f"{name!r} draws less bandwidth at a larger quota" in str(why_not_exact(instance.graph, cost))
    with pytest.raises(ValueError, match="cannot prune by"):
        solve(instance.graph, cost, instance.device, num_devices=instance.num_devices, method="exact")
