"""Plans made for starts that wait for inputs and slots only: a search over order, stages and quotas by simulation.

The staged optimum is where it starts. A candidate is an order of the modules with a degree and a quota for each; list
scheduling gives every module in turn the devices and slots that are free first. Stages follow from it: a module's
stage is the first after all that it waits for. Simulated annealing changes the order or one module's option.

Off by default: see ``gain`` of the result and ``bench/README.md`` for what it brings.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, Stage
from mosaic.profile import Phase
from mosaic.solver.gahc.stage_eval import StageResult
from mosaic.solver.list_schedule import Candidate, Lane, list_schedule
from mosaic.solver.options import DeploymentOption, QuotaGrid, all_options
from mosaic.solver.predict import build_stage
from mosaic.solver.simulate import SimulatedStep, StepModel, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rearranged:
    """A plan whose simulated step is at most as long as that of the plan it started from."""

    plan: Plan
    """Its ``predicted_ms`` is with barriers, and may be above that of the staged plan."""
    step: SimulatedStep
    """One simulated step of it."""
    staged_ms: float
    """Simulated step of the plan that the search started from, in milliseconds."""

    @property
    def gain(self) -> float:
        """Share of the simulated step that it saves; 0 where nothing better was found."""
        return 1 - self.step.makespan_ms / self.staged_ms if self.staged_ms > 0 else 0.0


def rearrange(
    plan: Plan,
    graph: ModuleGraph,
    cost: Cost,
    *,
    iterations: int = 2000,
    seed: int = 0,
    grid: QuotaGrid | None = None,
) -> Rearranged:
    """Searches for a plan with a shorter simulated step.

    Args:
        plan: The staged plan to start from; gives device and number of devices.
        graph: What it was made for.
        cost: What it was made with; times beside neighbours are those of whoever really runs beside.
        iterations: Candidates to simulate; the same number and seed give the same plan.
        seed: Seed of the annealing.
        grid: Quotas to consider.
    """
    options = all_options(graph, cost=cost, device=plan.device, num_devices=plan.num_devices, grid=grid)
    model = StepModel(cost=cost)
    staged = simulate(plan, graph, model)
    annealing = _Annealing(graph, options, plan.device, plan.num_devices, cost, random.Random(seed))
    best = annealing.run(_candidate(plan, options), iterations)
    made = replace(plan, stages=_stages(best, cost), search=replace(plan.search, status="feasible"))
    step = simulate(made, graph, model)
    if step.makespan_ms >= staged.makespan_ms or not _fits(made, cost):
        return Rearranged(plan=plan, step=staged, staged_ms=staged.makespan_ms)
    return Rearranged(plan=made, step=step, staged_ms=staged.makespan_ms)


class _Annealing:
    def __init__(
        self,
        graph: ModuleGraph,
        options: Mapping[str, Sequence[DeploymentOption]],
        device: Device,
        num_devices: int,
        cost: Cost,
        draw: random.Random,
    ) -> None:
        self._graph = graph
        self._options = options
        self._shape = (num_devices, device.num_slots)
        self._cost = cost
        self._draw = draw

    def run(self, start: Candidate, iterations: int) -> tuple[Lane, ...]:
        """Returns the best schedule found."""
        now = start
        lanes = list_schedule(now, self._graph, *self._shape)
        value = self._step_ms(lanes)
        best_value, best = value, lanes
        first = 0.03 * value
        for turn in range(iterations):
            heat = first * (0.01 ** (turn / max(1, iterations - 1)))
            candidate = self._change(now)
            if candidate is None:
                continue
            lanes = list_schedule(candidate, self._graph, *self._shape)
            tried = self._step_ms(lanes)
            if tried <= value or self._draw.random() < math.exp((value - tried) / max(heat, 1e-12)):
                now, value = candidate, tried
                if value < best_value:
                    best_value, best = value, lanes
        return best

    def _step_ms(self, lanes: Sequence[Lane]) -> float:
        """Forward and backward, alone: neighbours are looked at once the search is over."""
        total = 0.0
        for phase in Phase:
            order = lanes if phase is Phase.FORWARD else tuple(reversed(lanes))
            ended: dict[str, float] = {}
            for lane in order:
                waits = lane.before if phase is Phase.FORWARD else lane.behind
                length = lane.option.forward_ns if phase is Phase.FORWARD else lane.option.backward_ns
                ended[lane.module] = max((ended[name] for name in waits), default=0.0) + length
            total += max(ended.values())
        return total

    def _change(self, now: Candidate) -> Candidate | None:
        name = self._draw.choice(now.order)
        if self._draw.random() < 0.5:
            option = self._draw.choice(self._options[name])
            return None if option == now.options[name] else replace(now, options={**now.options, name: option})
        others = [other for other in now.order if other != name]
        place = {other: index for index, other in enumerate(others)}
        low = max((place[other] + 1 for other in self._graph.predecessors(name)), default=0)
        high = min((place[other] for other in self._graph.successors(name)), default=len(others))
        others.insert(self._draw.randint(low, high), name)
        return None if tuple(others) == now.order else replace(now, order=tuple(others))


def _candidate(plan: Plan, options: Mapping[str, Sequence[DeploymentOption]]) -> Candidate:
    chosen = {}
    for placement in plan.placements:
        own = options[placement.module]
        fitting = [o for o in own if (o.degree, o.quota) == (placement.degree, placement.quota)]
        chosen[placement.module] = fitting[0] if fitting else own[0]
    return Candidate(order=tuple(placement.module for placement in plan.placements), options=chosen)


def _stages(lanes: Sequence[Lane], cost: Cost) -> tuple[Stage, ...]:
    """Puts each module into the first stage after all that it waits for."""
    level: dict[str, int] = {}
    for lane in lanes:
        level[lane.module] = 1 + max((level[name] for name in lane.before), default=-1)
    stages = []
    for index in range(max(level.values()) + 1):
        here = [lane for lane in lanes if level[lane.module] == index]
        result = StageResult(
            latency_ns=max(lane.option.latency_ns for lane in here),
            choices={lane.module: (lane.option, lane.devices) for lane in here},
            starts={lane.module: lane.starts for lane in here},
        )
        stages.append(build_stage(result, cost))
    return tuple(stages)


def _fits(plan: Plan, cost: Cost) -> bool:
    """Whether devices hold what all modules keep, and the work of each stage beyond that, as in every other plan."""
    limit = plan.device.memory_bytes
    kept = {p.module: cost.kept_bytes(p.module, p.degree) for p in plan.placements}
    return not limit or all(
        sum(kept[p.module] for p in plan.placements if device in p.devices)
        + sum(cost.memory_bytes(p.module, p.degree) - kept[p.module] for p in stage.placements if device in p.devices)
        <= limit
        for stage in plan.stages
        for device in range(plan.num_devices)
    )
