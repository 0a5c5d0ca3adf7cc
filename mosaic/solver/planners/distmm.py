"""DistMM: parallel modules on disjoint whole devices, each with a number of its own, so that they end together.

DistMM (Huang et al., NSDI 2024, https://www.usenix.org/conference/nsdi24/presentation/huang) has no public code, and
its text was not at hand: only the abstract, public notes on its four parts, and Mosaic's section 2.2 (Fig. 3b). So its
own balancer is not known. It gets the best plan of its stated space, whoever would find it:

* modules that run at the same time have disjoint sets of whole devices, one set each;
* each has a data-parallel degree of its own, any whole number that the cost model offers (*data load balancer*);
* modules that depend on each other are in stages after each other; independent ones may share a stage whatever their
  depth, and take several stages where they are more than the devices or where that is faster;
* a stage ends when its slowest forward, and in the backward its slowest backward, has ended: the *batch-sync* between
  the towers and a loss over the whole batch.

That is the space of our exact search with one option a degree, the whole device, so it finds the plan and proves it
best of its kind where the limits on time allow. Devices that a stage leaves over go to modules that gain from them.

Not here, since the cost model knows data parallelism alone: tensor parallelism of a heavy tower, and DistMM-Pipe, which
pipelines micro-batches through the layers of a tower on both sides of a batch-sync. ``distmm-mt`` is the extension to
several tasks that the Spindle paper compares with (its section 5.1): each task by itself, one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mosaic.cost import Cost, NoInterference
from mosaic.cost.protocol import RetimedCost
from mosaic.errors import UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.profile import Phase
from mosaic.solver.exact.search import ExactResult, search_exactly
from mosaic.solver.memory.search import search_within_memory
from mosaic.solver.planners.draft import DraftWave, Job, Sheet, Widths, whole_job
from mosaic.solver.planners.waves import as_found, plan_waves, sheet_of
from mosaic.solver.task import Found, Task

_log = logging.getLogger(__name__)


class _Apart(RetimedCost):
    """A cost model's times on whole devices, where no module has a neighbour."""

    def __init__(self, base: Cost, widths: Mapping[str, Widths]) -> None:
        super().__init__(base)
        self.interference = NoInterference()
        self._quotas = {(name, option.degree): option.quota for name, own in widths.items() for option in own}

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time at the most slots that the module may have of a device."""
        return self.base.time_ms(module, phase, degree, self._quotas[module, degree])


def find(task: Task) -> Found:
    """Plans all modules together.

    Raises:
        InfeasibleError: No plan of whole devices fits into memory, which is proven.
        UndecidedError: None was found, and it is not proven that there is none.
    """
    try:
        return plan_waves(task, draw)
    except UndecidedError:  # devices do not hold the fastest: search among those that they hold
        sheet = sheet_of(task)
        found = search_within_memory(
            task.graph,
            _options(sheet, task.graph),
            cost=_Apart(sheet.cost, sheet.widths),
            machine=sheet.machine,
            limits=sheet.limits,
        )
        _warn_unproven(found, sheet)
        homes = [[devices for _, devices in stage.choices.values()] for stage in found.stages]
        return as_found(task, _waves(found, sheet), homes)


def draw(sheet: Sheet) -> Iterator[Sequence[DraftWave]]:
    """Draws the fastest waves of all modules."""
    return _drafts([best(sheet, sheet.graph)], sheet)


def draw_by_task(sheet: Sheet) -> Iterator[Sequence[DraftWave]]:
    """Draws ``distmm-mt``: the fastest waves of each task, one task after the other."""
    tasks = sheet.settings.tasks or (sheet.graph.names,)
    return _drafts([best(sheet, _of_task(task, sheet.graph)) for task in tasks], sheet)


def best(sheet: Sheet, graph: ModuleGraph) -> ExactResult:
    """Finds the fastest waves of a graph; its record says whether they are proven best of all on whole devices."""
    machine = replace(sheet.machine, memory_bytes=0)  # each option fits alone, and shares no device
    cost = _Apart(sheet.cost, sheet.widths)
    found = search_exactly(graph, _options(sheet, graph), cost=cost, machine=machine, limits=sheet.limits)
    _warn_unproven(found, sheet)
    return found


def _warn_unproven(found: ExactResult, sheet: Sheet) -> None:
    """Says by how much DistMM may be better than the plan that it is given."""
    if sheet.is_judged and found.record.status != "optimal":
        bound_ms = found.record.bound_ms
        _log.warning(
            "DistMM's plan of %d modules is not proven best with effort %g: its best may take %.1f %% less",
            sum(len(stage.choices) for stage in found.stages),
            sheet.limits.effort,
            100 * (1 - bound_ms / found.cost_ms) if found.cost_ms > 0 else 0.0,
        )


def _options(sheet: Sheet, graph: ModuleGraph) -> dict[str, Widths]:
    """The whole-device options of a graph's modules, each holding all slots."""
    slots = sheet.machine.num_slots
    return {name: tuple(replace(option, quota=slots) for option in sheet.widths[name]) for name in graph.names}


def _of_task(names: Sequence[str], graph: ModuleGraph) -> ModuleGraph:
    return ModuleGraph(
        modules=tuple(module for module in graph.modules if module.name in names),
        edges=tuple(edge for edge in graph.edges if edge.source in names and edge.target in names),
    )


def _drafts(found: Sequence[ExactResult], sheet: Sheet) -> Iterator[Sequence[DraftWave]]:
    waves = [wave for one in found for wave in _waves(one, sheet)]
    yield [_with_rest(wave, sheet) for wave in waves]
    yield waves


def _waves(found: ExactResult, sheet: Sheet) -> list[DraftWave]:
    def job(name: str, degree: int) -> Job:
        return whole_job(name, next(option for option in sheet.widths[name] if option.degree == degree))

    return [tuple(job(name, option.degree) for name, (option, _) in one.choices.items()) for one in found.stages]


def _with_rest(wave: DraftWave, sheet: Sheet) -> DraftWave:
    """Gives devices left over to the slowest module that gains from them without getting slower in a phase."""
    chosen = {job.names[0]: job.options[0] for job in wave}
    while True:
        idle = sheet.num_devices - sum(option.degree for option in chosen.values())
        for name, now in sorted(chosen.items(), key=lambda item: -item[1].latency_ns):
            better = [
                option
                for option in sheet.widths[name]
                if now.degree < option.degree <= now.degree + idle
                and option.latency_ns < now.latency_ns
                and option.forward_ns <= now.forward_ns
                and option.backward_ns <= now.backward_ns
            ]
            if better:
                chosen[name] = better[0]
                break
        else:
            return tuple(whole_job(name, option) for name, option in chosen.items())
