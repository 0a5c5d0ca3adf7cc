"""Instances drawn at random, small enough for brute force."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from brute_force import plan_by_brute_force
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from plan_checker import ROUNDING, checked_ms

from mosaic.errors import InfeasibleError
from mosaic.plan import Plan
from mosaic.solver.instance import Disturbance, Instance, InstanceModule, InstanceOption, TableCost
from mosaic.solver.limits import SearchLimits
from mosaic.solver.runnable import plan_to_run
from mosaic.solver.task import SearchOptions

ROUNDING_MS = 1e-4


def option(degree: int = 1, quota: int = 1, forward_ms: float = 1.0, backward_ms: float = 2.0, memory_bytes: int = 0):
    return InstanceOption(
        degree=degree, quota=quota, forward_ms=forward_ms, backward_ms=backward_ms, memory_bytes=memory_bytes
    )


def module(name: str, *options: InstanceOption, after: tuple[str, ...] = ()):
    return InstanceModule(name=name, options=options or (option(),), after=after)


def instance(*modules: InstanceModule, **fields: object) -> Instance:
    return Instance(**{"name": "test", "num_devices": 2, "num_slots": 4, "modules": modules, **fields})


def bounded(examples: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=slow)


@st.composite
def modules(
    draw: st.DrawFn, name: str, before: list[str], num_slots: int, num_devices: int, *, is_held: bool
) -> InstanceModule:
    """Any table at all: times need not fall with slots or devices."""
    shapes = draw(
        st.lists(st.tuples(st.integers(1, num_devices), st.integers(1, num_slots)), min_size=1, max_size=5, unique=True)
    )
    state, batch, working = (draw(st.integers(0, 9)) if is_held else 0 for _ in range(3))
    memory = {
        degree: (state, -(-batch // degree), working // degree if is_held else draw(st.integers(0, 10)))
        for degree in sorted({degree for degree, _ in shapes})
    }
    times = st.integers(0, 30_000_000)  # nanoseconds
    options = tuple(
        InstanceOption(
            degree=degree,
            quota=quota,
            forward_ms=draw(times) / 1e6,
            backward_ms=draw(times) / 1e6,
            memory_bytes=sum(memory[degree]),
            resident_bytes=memory[degree][0],
            activation_bytes=memory[degree][1],
        )
        for degree, quota in shapes
    )
    after = tuple(draw(st.lists(st.sampled_from(before), max_size=2, unique=True))) if before else ()
    return InstanceModule(name=name, options=options, after=after)


@st.composite
def instances(draw: st.DrawFn, most_modules: int = 5, *, has_pairs: bool = True, is_held: bool = False) -> Instance:
    """With ``is_held`` modules keep memory across stages, and devices have little more than they must hold."""
    num_devices, num_slots = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    names: list[str] = []
    made = []
    for name in "abcde"[: draw(st.integers(1, most_modules))]:
        made.append(draw(modules(name, names, num_slots, num_devices, is_held=is_held)))
        names.append(name)
    pairs = [(own, other) for own in names for other in names if own != other and has_pairs]
    disturbed = draw(st.lists(st.sampled_from(pairs), max_size=6, unique=True)) if pairs else []
    share = st.sampled_from([0.0, 0.1, 0.5, 2.0])
    memory_bytes = draw(st.sampled_from([0, 10, 14, 20]))
    if is_held:
        kept = [min(o.degree * (o.resident_bytes + o.activation_bytes) for o in one.options) for one in made]
        most = max(min(o.memory_bytes for o in one.options) for one in made)
        memory_bytes = max(1, most, sum(kept) // num_devices) + draw(st.integers(0, 12))
    return Instance(
        name="random",
        num_devices=num_devices,
        num_slots=num_slots,
        memory_bytes=memory_bytes,
        modules=tuple(made),
        disturbances=tuple(
            Disturbance(module=own, beside=other, forward=draw(share), backward=draw(share)) for own, other in disturbed
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The outcome of planning an instance, by the checker's arithmetic."""

    status: str
    objective_ms: float | None = None
    bound_ms: float | None = None
    reasons: tuple[str, ...] = ()
    plan: Plan | None = None


def solve_instance(instance: Instance, *, method: str = "exact", time_limit: float = 10.0) -> Solved:
    """Plans as ``mosaic plan`` does, and has the checker accept the plan."""
    limits = SearchLimits(effort=time_limit)
    try:
        plan_it = plan_by_brute_force if method == "brute_force" else partial(plan_to_run, method)
        plan = plan_it(
            instance.graph,
            TableCost(instance),
            instance.device,
            num_devices=instance.num_devices,
            search=SearchOptions(limits=limits),
        )
    except InfeasibleError as error:
        return Solved(status="infeasible", reasons=error.reasons)
    objective_ms, bound_ms = checked_ms(instance, plan), plan.search.bound_ms
    assert bound_ms <= objective_ms + ROUNDING * max(objective_ms, len(plan.stages))
    return Solved(status=plan.search.status, objective_ms=objective_ms, bound_ms=min(bound_ms, objective_ms), plan=plan)
