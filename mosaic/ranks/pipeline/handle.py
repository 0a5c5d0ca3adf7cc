"""A model that runs in a pipeline: steps of microbatches, and what a loop needs beside them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.artifact import fingerprint
from mosaic.checkpoint.belongings import Belongings
from mosaic.checkpoint.methods import KeepsCheckpoints
from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.kept_way import KeptWay
from mosaic.pipelining.next_step.planner import NextStepPlanner
from mosaic.pipelining.next_step.step_planning import SharedStepPlanning, StepPlanning
from mosaic.pipelining.order.simulate import simulate
from mosaic.pipelining.replicas import SharedStep
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.pipelining.tasks import TaskGraph, Timed
from mosaic.pipelining.workload.counted import CountedMicrobatch
from mosaic.ranks.pipeline.fitting import gather_tasks
from mosaic.ranks.pipeline.trial import Candidates, PipelineTrial
from mosaic.ranks.pipeline.ways import RanStep
from mosaic.ranks.running import loops

_LOG = logging.getLogger("mosaic")

MAX_SCHEDULES = 256
"""Steps of different shapes whose schedules are kept."""
PLANNING_SHARE = 0.05
"""Of the time of the last step, for a step that nobody announced."""

Step = Sequence[Mapping[str, Any]]
"""Microbatches, as keyword arguments of the model; the same on every rank."""


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """One step twice: its tasks, and when each starts."""

    measured: tuple[TaskGraph, tuple[int, ...]]
    """With the times that tasks took."""
    simulated: tuple[TaskGraph, tuple[int, ...]]
    """The same order with counted times."""


class Pipeline(KeepsCheckpoints):
    """A model whose layers are on several ranks; every rank makes the same calls.

    Attributes:
        world: The ranks.
        degrees: Replicas of the pipeline, and ranks of each.
        partition: Which layers are where in each.
        trial: What was tried at the start.
        active: Whether the ranks still run it.
    """

    def __init__(self, candidates: Candidates, trial: PipelineTrial) -> None:
        self.world = candidates.world
        self.degrees = trial.best.degrees
        self.partition = trial.best.partition
        self.trial = trial
        self._model = candidates.model
        self._ranks = candidates.world
        self._counted, self._grids = candidates.counted, candidates.grids
        self._way, self._slices = trial.best, candidates.slices
        self._runner = candidates.runner(trial.best, keeps_all=False)
        self._lacks_weights = bool(self._runner.parted.give_memory())
        self._schedules: dict[tuple[str, ...], SharedStep] = {}
        self._ahead: NextStepPlanner | None = None
        self._next: Step | None = None
        self._announced = -1
        self._number = 0
        self._last_s = 0.0
        self._failed_ahead = 0
        self._ran: tuple[Step, SharedStep, RanStep] | None = None
        self.active = True
        elsewhere = self._runner.sums.counted_elsewhere
        parameters = list(candidates.model.parameters())
        self._counted_here = {id(one): not one.is_meta and id(one) not in elsewhere for one in parameters}
        self._divided = frozenset(map(id, parameters)) if self.degrees.data < self.world.size else frozenset()
        loops.enter(self)

    def step(self, microbatches: Step, *, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Runs forward and backward of a step; gradients are those of the mean of the microbatches' losses.

        Args:
            microbatches: The step's.
            scaler: Scales the losses before backward; ``scaler.step(optimizer)`` then skips on all ranks or on none.

        Returns:
            The loss of each microbatch, on every rank.

        Raises:
            ValueError: There are no microbatches.
            InvalidScheduleError: Ranks have other microbatches.
            RankFailedError: Another rank has failed; names it.
        """
        if not microbatches:
            raise ValueError("no microbatches; a step has at least one")
        if self._lacks_weights:
            raise ValueError("the model was on the meta device; give it weights by pipe.load_weights or pipe.load")
        began = time.perf_counter()
        counted = [self._counted.microbatch(one) for one in microbatches]
        shared = self._shared(microbatches, counted)
        self._announce()
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.world.device))  # ranks without a loss know the scale, too
        shapes = [one.key for one in counted]
        ran = self._runner.run(shared, microbatches, shapes=shapes, scale=None if scaler is None else scaler.scale)
        self._ran = microbatches, shared, ran
        self._number += 1
        self._last_s = time.perf_counter() - began
        return ran.losses

    def ahead(self, loader: Iterable[Step]) -> Iterator[Step]:
        """Gives the steps of a loader, each one read while the one before is still to run.

        So the schedule of the next step is searched in a process beside this one, on at most half of the cores; what it
        has found when its turn comes is taken, and nobody waits for it.
        """
        steps = iter(loader)
        following = next(steps, None)
        while following is not None:
            now, following = following, next(steps, None)
            self._next = following
            yield now

    @property
    def kept_way(self) -> KeptWay:
        """What runs, as plain data to be kept; ``mosaic.pipeline(..., plan=)`` takes it in a later start."""
        return self._way.kept()

    def parameters(self) -> Iterable[nn.Parameter]:
        """Returns the parameters that are on this rank."""
        return [one for one in self._model.parameters() if not one.is_meta]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all ranks so that their norm is at most ``max_norm``; returns the norm before.

        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does the same.
        """
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, norm_type)

    def metrics(self) -> dict[str, float]:
        """Returns times of the last step and of each way that was tried at the start, and how many schedules are known.

        ``failed_ahead`` counts steps whose planning ahead failed, on rank 0.
        """
        tried = {f"trial_ms/{name}": ms for name, ms in self.trial.step_ms.items()}
        counts = {"schedules": float(len(self._schedules)), "failed_ahead": float(self._failed_ahead)}
        return {"step_ms": 1e3 * self._last_s, **counts, **tried}

    def describe(self) -> str:
        """Says which way was taken and why, and which chunks are on which rank."""
        replicas = "" if self.degrees.data == 1 else f", {self.degrees.data} replicas of {self.degrees.pipeline}"
        replicas += "" if self.degrees.tensor == 1 else f", {self.degrees.tensor} ranks a layer"
        lines = [f"{self._way.name} on {self.world.size} ranks{replicas}"]
        lines += [f"tried at the start: {name} {ms:.1f} ms a step" for name, ms in self.trial.step_ms.items()]
        lines += [f"not tried: {name}: {reason}" for name, reason in self.trial.reasons.items()]
        for place in range(self.partition.num_ranks):
            chunks = ", ".join(str(chunk) for chunk in self.partition.chunks if chunk.rank == place)
            ranks = self._runner.grid.holders([place])
            lines.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {chunks}")
        return "\n".join(lines)

    def last_step(self) -> PlayedStep:
        """Returns the last step, as measured on the ranks of this one's replica and as simulated; every rank calls it.

        ``mosaic.report.pipeline_picture.draw_pipelines`` draws both on one axis of time.

        Raises:
            ValueError: No step has run, or this rank's replica had no microbatches.
        """
        if self._ran is None:
            raise ValueError("no step has run; call last_step() after step()")
        microbatches, shared, ran = self._ran
        grid = self._runner.grid
        schedule = shared.schedules[grid.replica]
        if schedule is None:
            raise ValueError(f"replica {grid.replica} had none of {len(microbatches)} microbatches; ask another rank")
        measured = gather_tasks(ran.times, grid.executor)
        counted = [self._counted.microbatch(microbatches[at]) for at in shared.shares[grid.replica]]
        graph = self._way.tasks(counted, schedule)
        return PlayedStep(measured=measured.of(graph), simulated=(graph, _starts(graph, schedule)))

    def remove(self) -> None:
        """Leaves the other ranks; the model keeps the weights that are here."""
        self.active = False
        loops.leave(self)
        if self._ahead is not None:
            self._ahead.close()
        self._grids.close()
        self.world.close()

    def _shared(self, microbatches: Step, counted: Sequence[CountedMicrobatch]) -> SharedStep:
        """Returns what was searched ahead, or is known of steps like this one, or can be planned at once."""
        key = tuple(one.key for one in counted)
        self._check_alike(microbatches, key)
        is_announced, self._announced = self._announced == self._number, -1
        own = None
        if self.world.rank == 0 and is_announced and self._ahead is not None:
            handed = self._ahead.take(self._number)
            own = handed.schedule if handed.step == self._number else None
            self._note(handed.error)
        if is_announced:
            own = self.world.first_says(own)
        if own is None and key in self._schedules:
            return self._schedules[key]
        if own is None:
            if self.world.rank == 0:
                seconds = PLANNING_SHARE * self._last_s if self._number else None
                own = self._way.plan_shared(counted, seconds=seconds)
            own = self.world.first_says(own)
        shared: SharedStep | None = own
        assert shared is not None
        if len(self._schedules) >= MAX_SCHEDULES:
            self._schedules.pop(next(iter(self._schedules)))
        self._schedules[key] = shared
        return shared

    def _note(self, error: str) -> None:
        """Says once that planning ahead fails, and counts how often; such steps are planned when their turn comes."""
        if error:
            self._failed_ahead += 1
            if self._failed_ahead == 1:
                _LOG.warning("step %d could not be planned ahead: %s", self._number, error)

    def _check_alike(self, microbatches: Step, key: tuple[str, ...]) -> None:
        """Raises InvalidScheduleError on all ranks unless they have the same shapes, and on CPUs the same values."""
        tensors = [one for microbatch in microbatches for one in microbatch.values() if isinstance(one, Tensor)]
        values = [torch.hash_tensor(one).view(torch.int64).item() for one in tensors if one.device.type == "cpu"]
        told = self.world.tell((fingerprint(key), fingerprint(values)))
        for rank, other in enumerate(told):
            if other != told[0]:
                what = "shapes" if other[0] != told[0][0] else "values"
                raise InvalidScheduleError(
                    f"microbatches of rank {rank} have other {what} than rank 0's; give all ranks the same microbatches"
                )

    def _announce(self) -> None:
        """Has the next step planned while this one runs."""
        following, self._next = self._next, None
        if following is None or self._way.baseline:
            return
        self._announced = self._number + 1
        counted = [self._counted.microbatch(one) for one in following]
        if self.world.rank == 0:
            way = self._way
            if self._ahead is None:
                planning = StepPlanning(
                    request=way.request, partition=way.partition, space=way.space, options=way.options
                )
                self._ahead = NextStepPlanner(SharedStepPlanning(pipeline=planning, num_replicas=self.degrees.data))
            self._ahead.start(self._announced, counted, step_s=self._last_s or None)

    def _made_whole(self, belongings: Belongings | None = None) -> AbstractContextManager[None]:
        if self._slices is None:
            return nullcontext()
        beside = () if belongings is None else (belongings.companions or {}).values()
        optimizers = () if belongings is None else belongings.optimizers.values()
        return self._slices.whole([self._model, *beside], optimizers)

    def _plan_name(self) -> str:
        return f"pipeline of {self.degrees.data} x {self.degrees.pipeline} x {self.degrees.tensor}"

    def _settle(self) -> None:
        """Does nothing: a step has ended when ``step`` returns."""


def _starts(graph: TaskGraph, schedule: PipelineSchedule) -> tuple[int, ...]:
    """Simulates a schedule's orders."""
    index = {str(TaskName.of(task)): at for at, task in enumerate(graph.tasks)}
    orders = tuple(tuple(index[cell] for cell in row if cell in index) for row in schedule.rows)
    timed = simulate(replace(graph, limit_bytes=()), orders)
    assert isinstance(timed, Timed)
    return tuple(timed.start_ns)
