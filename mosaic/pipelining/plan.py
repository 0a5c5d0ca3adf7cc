"""The plan of a pipeline as plain data, and the planner of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mosaic.pipelining.layers import CountedModule, Microbatch, ModuleFit
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.planner import PlannerOptions, SharedStep, plan_baseline, plan_step, shares_of
from mosaic.pipelining.rank_hardware import Degrees
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.pipelining.task_graph import RankSpace, task_graph
from mosaic.pipelining.tasks import TaskGraph, Timed, simulate


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Value of ``Pipeline.plan``, for ``mosaic.pipeline(plan=)`` with the same model and sample."""

    name: str
    baseline: str = ""
    """One of ``BASELINES``; empty: each step is planned."""
    degrees: Degrees
    partition: Partition
    """Layers of each rank of a pipeline."""
    fitted: Mapping[str, ModuleFit] = field(default_factory=dict)
    """Corrections of counted times by a measured step, by module; by default none."""
    predicted_ms: float = 0.0
    """A step of the sample, gradients' sums included; 0: not predicted."""


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """Plans the steps of a pipeline; plain data, for a process beside the training one."""

    plan: PipelinePlan
    request: Request
    """Model with fitted times, ranks of one pipeline, and the microbatches of the sample."""
    space: RankSpace
    options: PlannerOptions

    def __call__(self, step: Sequence[Microbatch], limits: OrderLimits) -> SharedStep:
        """Plans a step with the options' effort, and the clock, the threads and the end of ``limits``."""
        own = replace(
            self.options.limits, seconds=limits.seconds, threads=limits.threads, should_stop=limits.should_stop
        )
        return self._plan(step, own)

    def plan_step(self, step: Sequence[Microbatch], *, seconds: float | None = None) -> SharedStep:
        """Plans a step; ``seconds`` of the clock end the search, unless roll-outs do. With 0 orders are natural.

        Raises:
            InfeasibleError, ValueError: See ``plan_step`` and ``plan_baseline``.
        """
        limits = self.options.limits
        if seconds is not None and (limits.rollouts is None or not seconds):
            limits = replace(limits, seconds=min(limits.seconds, seconds))
        return self._plan(step, limits)

    def plan_forwards(self, step: Sequence[Microbatch]) -> SharedStep:
        """Plans the forwards of microbatches at once: a step of modules that train nothing."""
        modules = [module for module in self.request.model.modules if isinstance(module, CountedModule)]
        frozen = tuple(replace(module, trains=(False,) * len(module.trains)) for module in modules)
        request = replace(self.request, model=replace(self.request.model, modules=frozen))
        return replace(self, request=request, space=replace(self.space, limit_bytes=0)).plan_step(step, seconds=0.0)

    def tasks(self, step: Sequence[Microbatch], schedule: PipelineSchedule) -> TaskGraph:
        """Returns the tasks of a step, with the times and bytes of its schedule's strategies."""
        layers = {TaskName.parse(text): own for text, own in schedule.strategies.items()}
        pairs = {(task.chunk, task.microbatch, task.piece): own for task, own in layers.items()}
        strategies = pairs or schedule.strategy
        return task_graph(self.request.model, self.plan.partition, step, self.space, strategies=strategies)

    def simulate(self, step: Sequence[Microbatch], schedule: PipelineSchedule) -> tuple[TaskGraph, Timed]:
        """Returns the tasks of a step, and their times in a schedule's orders, whatever memory they take."""
        graph = replace(self.tasks(step, schedule), limit_bytes=())
        index = {str(TaskName.of(task)): at for at, task in enumerate(graph.tasks)}
        timed = simulate(graph, tuple(tuple(index[cell] for cell in row if cell in index) for row in schedule.rows))
        assert isinstance(timed, Timed)
        return graph, timed

    def _plan(self, step: Sequence[Microbatch], limits: OrderLimits) -> SharedStep:
        """Plans each replica's share of a step, in its share of the limits."""
        plan, shares = self.plan, shares_of(self.request, step, self.plan.degrees.data)
        limits = limits.share(1 / max(1, sum(map(bool, shares))))
        is_natural = limits.is_counted_out or limits.seconds == 0
        options = replace(self.options, limits=limits, method="natural" if is_natural else self.options.method)

        def schedule(share: tuple[int, ...]) -> PipelineSchedule:
            own = [step[at] for at in share]
            if plan.baseline:
                return plan_baseline(plan.baseline, self.request, own, space=self.space).schedule()
            return plan_step(self.request, own, space=self.space, options=options, partition=plan.partition).schedule()

        return SharedStep(shares=shares, schedules=tuple(schedule(share) if share else None for share in shares))
