"""DistMM: parallel modules on disjoint whole devices, with degrees that make them end together.

DistMM (Huang et al., NSDI 2024, https://www.usenix.org/conference/nsdi24/presentation/huang) has no public code, and
its text was not available: sources are the abstract, public notes on its four parts, and Mosaic's section 2.2 (Fig.
3b). Its own balancer is unknown, so this planner returns the best plan of its stated space:

* modules that run at the same time have disjoint sets of whole devices, one set each;
* each has its own data-parallel degree, any that the cost model offers (*data load balancer*);
* dependent modules are in successive stages; independent ones of any depth may share a stage, or take several if they
  outnumber the devices or if that is faster;
* a stage ends when its slowest forward, and in the backward its slowest backward, has ended: the *batch-sync* between
  the towers and a loss over the whole batch.

That is the space of our exact search with one option per degree, the whole device (of Algorithm 1 for more modules).
Idle devices of a stage go to modules that gain from them. Tensor parallelism of a heavy tower and DistMM-Pipe are left
out, because the cost model has only data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mosaic.cost import Cost, NoInterference
from mosaic.cost.protocol import RetimedCost
from mosaic.errors import UndecidedError
from mosaic.profile import Phase
from mosaic.solver.exact import search_exactly, why_not_exact
from mosaic.solver.gahc.clustering import cluster
from mosaic.solver.gahc.stage_eval import StageEvaluator
from mosaic.solver.held_memory import search_within_memory
from mosaic.solver.limits import Countdown
from mosaic.solver.planners.waves import Wave, Waves, Widths, answer_of, plan_waves, whole_job, widths_of
from mosaic.solver.stage import StageResult
from mosaic.solver.task import Answer, Task


class _Apart(RetimedCost):
    """A cost model's times on whole devices, without neighbours."""

    def __init__(self, base: Cost, widths: Mapping[str, Widths]) -> None:
        super().__init__(base)
        self.interference = NoInterference()
        self._quotas = {(name, option.degree): option.quota for name, own in widths.items() for option in own}

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        return self.base.time_ms(module, phase, degree, self._quotas[module, degree])


def plan(task: Task) -> Answer:
    """Plans the fastest waves.

    Raises:
        InfeasibleError: It is proven that no plan of whole devices fits into memory.
        UndecidedError: No plan was found, and it is not proven that none exists.
    """
    widths, machine = widths_of(task), task.machine
    options = {name: tuple(replace(o, quota=machine.num_slots) for o in own) for name, own in widths.items()}
    cost, limits = _Apart(task.cost, widths), task.search.limits
    free = replace(machine, memory_bytes=0)  # options fit alone and share no device
    is_searched = why_not_exact(task.graph) is None
    if is_searched:
        stages = search_exactly(task.graph, options, cost=cost, machine=free, limits=limits).stages
    else:
        stages = cluster(task.graph, StageEvaluator(options, cost=cost, machine=free, countdown=Countdown(limits)))
    waves = _waves(stages, widths)
    try:
        return plan_waves(task, [[_with_idle(wave, widths, machine.num_devices) for wave in waves], waves])
    except UndecidedError:
        if not is_searched:
            raise
        result = search_within_memory(task.graph, options, cost=cost, machine=machine, limits=limits)
        return answer_of(task, _waves(result.stages, widths), [stage.devices for stage in result.stages])


def _waves(stages: Sequence[StageResult], widths: Mapping[str, Widths]) -> Waves:
    jobs = {(name, option.degree): whole_job(name, option) for name, own in widths.items() for option in own}
    return [tuple(jobs[name, option.degree] for name, (option, _) in stage.choices.items()) for stage in stages]


def _with_idle(wave: Wave, widths: Mapping[str, Widths], num_devices: int) -> Wave:
    """Assigns idle devices to the slowest module that gains from them and is not slower in any phase."""
    option_of = {job.part.module: job.option for job in wave}
    while True:
        idle = num_devices - sum(option.degree for option in option_of.values())
        for name, current in sorted(option_of.items(), key=lambda item: -item[1].latency_ns):
            better = [
                option
                for option in widths[name]
                if current.degree < option.degree <= current.degree + idle
                and option.latency_ns < current.latency_ns
                and option.forward_ns <= current.forward_ns
                and option.backward_ns <= current.backward_ns
            ]
            if better:
                option_of[name] = better[0]
                break
        else:
            return tuple(whole_job(name, option) for name, option in option_of.items())
