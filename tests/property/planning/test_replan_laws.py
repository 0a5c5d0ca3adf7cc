"""Re-plans against cold solves: whatever changes, and however often, both prove the same time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from bench.solver.generate import SHAPES, Recipe, Shape, generate
from bench.solver.parts import without
from mosaic.errors import InfeasibleError
from mosaic.solver import SearchOptions, solve
from mosaic.solver.exact.search import SearchLimits
from mosaic.solver.instances.checker import check_plan
from mosaic.solver.instances.instance import Instance, InstanceModule
from mosaic.solver.instances.instance_cost import TableCost
from mosaic.solver.replan.replanner import Replanner

PROVEN = SearchOptions(limits=SearchLimits(effort=20))


def with_batch(instance: Instance, factor: float) -> Instance:
    """Every time in proportion to the batch, but for a floor."""

    def scaled(module: InstanceModule) -> InstanceModule:
        options = [
            replace(o, forward_ms=0.1 + factor * o.forward_ms, backward_ms=0.2 + factor * o.backward_ms)
            for o in module.options
        ]
        return replace(module, options=tuple(options))

    return replace(instance, modules=tuple(map(scaled, instance.modules)))


def changed(whole: Instance, draw: random.Random, counts: Sequence[int]) -> Iterator[Instance]:
    """One change after another: modules come and go, the batch, the devices, their memory, what disturbs what."""
    gone: set[str] = set()
    batch, num_devices, memory, is_calm = 1.0, whole.num_devices, 1.0, False
    for _ in range(12):
        kind = draw.choice(["module", "module", "module", "batch", "devices", "memory", "neighbours"])
        if kind == "module":
            gone ^= {draw.choice([module.name for module in whole.modules])}
            gone = gone if len(gone) < len(whole.modules) else set()
        batch = draw.choice([0.5, 1.0, 2.0]) if kind == "batch" else batch
        num_devices = draw.choice(counts) if kind == "devices" else num_devices
        memory = draw.choice([0.9, 1.0, 1.2, 2.0]) if kind == "memory" else memory
        is_calm = not is_calm if kind == "neighbours" else is_calm
        now = whole
        for name in sorted(gone):
            now = without(now, name)
        now = with_batch(now, batch) if batch != 1.0 else now
        now = replace(now, num_devices=num_devices, memory_bytes=round(memory * whole.memory_bytes))
        yield replace(now, disturbances=()) if is_calm else now


# Proofs with both at once take minutes, cold or not.
@pytest.mark.parametrize(("disturbed", "held"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replan_takes_as_long_as_a_cold_plan_whatever_changed(shape: Shape, disturbed: bool, held: bool) -> None:
    size = 5 if disturbed or held else 7
    draw = random.Random(f"{shape} {disturbed} {held}")
    whole = generate(
        Recipe(
            shape=shape,
            num_modules=size,
            num_devices=4,
            num_slots=6,
            seed=draw.randrange(100),
            disturbed=disturbed,
            held_memory=held,
            tight_memory=held,
        )
    )
    planner = Replanner(device=whole.device, num_devices=whole.num_devices, search=PROVEN)
    num_compared = 0
    for now in changed(whole, draw, counts=(4, 8) if held else (1, 2, 4)):
        cost = TableCost(now)
        given = {"device": now.device, "num_devices": now.num_devices}
        try:
            cold = solve(now.graph, TableCost(now), **given, method="exact", search=PROVEN)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                planner.update(now.graph, cost, **given, limits=PROVEN.limits)
            continue
        plan = planner.update(now.graph, cost, **given, limits=PROVEN.limits)
        assert (plan.search.status, cold.search.status) == ("optimal", "optimal")
        assert plan.predicted_ms == pytest.approx(cold.predicted_ms, rel=1e-6)
        assert plan.sequential_ms == pytest.approx(cold.sequential_ms)
        verdict = check_plan(now, plan)
        assert verdict.is_valid
        assert verdict.objective_ms == pytest.approx(plan.predicted_ms)
        num_compared += 1
    assert num_compared > 2
