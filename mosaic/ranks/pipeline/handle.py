"""A model that runs in a pipeline: steps of microbatches, and the rest of what a loop needs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.checkpoint.state import SavedState
from mosaic.parts.blank import without_fast_paths
from mosaic.parts.split import check_model
from mosaic.parts.weights import swappable
from mosaic.pipelining.layers import CountedMicrobatch
from mosaic.pipelining.plan import PipelinePlan
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, Verb
from mosaic.pipelining.tasks import TaskGraph
from mosaic.ranks.parameters.elsewhere import Elsewhere, Home, take_back, tensors_of
from mosaic.ranks.pipeline.chunk_work import Microbatches
from mosaic.ranks.pipeline.executor import Span
from mosaic.ranks.pipeline.lanes import describe_lanes
from mosaic.ranks.pipeline.random_numbers import Modes
from mosaic.ranks.pipeline.schedules import StepSchedules
from mosaic.ranks.pipeline.setup import PipelineSetup
from mosaic.ranks.pipeline.step import Digests, PipelineRunner, check_alike, digests_of, listed
from mosaic.ranks.pipeline.tensor import check_draws
from mosaic.ranks.pipeline.transport import TensorSpec
from mosaic.ranks.pipeline.trial import COLOCATED, PipelineTrial, gather_spans
from mosaic.ranks.running import loops
from mosaic.ranks.world.world import World

MAX_KINDS = 1024
"""Most kinds of steps that ranks have agreed on and know."""
_WAITS = (f"{Verb.WAIT_SEND}(", f"{Verb.WAIT_RECV}(")


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """One step twice: its tasks, and when each starts."""

    measured: tuple[TaskGraph, Sequence[int]]
    simulated: tuple[TaskGraph, Sequence[int]]
    """The same order with counted times."""


class Pipeline(Checkpointer):
    """A model whose layers are on several ranks; every rank makes the same calls.

    Attributes:
        world: The ranks.
        degrees: Replicas of the pipeline, and ranks of each.
        partition: Which layers are where in each.
        trial: What was tried at the start.
        active: Whether the ranks still run it.
    """

    _draws_alike = True

    def __init__(self, setup: PipelineSetup, trial: PipelineTrial) -> None:
        self.world = self._ranks = setup.world
        self.trial = trial
        self._setup, self._planner, self._slices, self._sequences = setup, trial.best, setup.slices, setup.sequences
        self.degrees, self.partition = trial.best.plan.degrees, trial.best.plan.partition
        self._model, self._grids = setup.model, setup.grids
        self._runner = PipelineRunner(setup, trial.best.plan, keeps_all=False)
        self._counted = setup.counted
        self._lacks_weights = bool(self._runner.parted.give_memory())
        stand_for_others(setup.model, setup.world)
        self._counted.whole.renew_stand_ins()
        self._schedules = StepSchedules(trial.best, setup.world)
        self._next: Microbatches | None = None
        self._number = 0
        self._last_s = 0.0
        self._kinds: set[tuple[str, str]] = set()
        self._played: tuple[list[CountedMicrobatch], PipelineSchedule | None] = [], None
        """The last step of this rank's replica."""
        self._spans: Sequence[Span] = ()
        self._modes = Modes(setup.model)
        self._checked_modes = self._modes.now()
        self.active = True
        elsewhere = self._runner.sums.counted_elsewhere
        parameters = list(setup.model.parameters())
        self._counted_here = {id(each): not each.is_meta and id(each) not in elsewhere for each in parameters}
        is_divided = self._runner.grid.num_copies < self.world.size
        self._divided = frozenset(map(id, parameters)) if is_divided else frozenset()
        loops.enter(self)

    @without_fast_paths()
    def step(self, microbatches: Microbatches, *, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Runs forward and backward of a step; gradients are those of the mean of the microbatches' losses.

        Args:
            microbatches: The step's.
            scaler: Scales the losses before backward; ``scaler.step(optimizer)`` then skips on all ranks or on none.

        Returns:
            The loss of each microbatch, on every rank.

        Raises:
            ValueError: There are no microbatches.
            InvalidScheduleError: Ranks have other microbatches. Of known shapes that shows at the step's end, and
                gradients are then to be dropped.
            RankFailedError: Another rank has failed; names it.
        """
        began = time.perf_counter()
        own, counted, digests = self._prepare(microbatches)
        shared = self._schedules.of(self._number, counted, last_s=self._last_s)
        self._announce()
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.world.device))  # ranks without a loss know the scale, too
        scale = None if scaler is None else scaler.scale
        losses, self._spans = self._runner.run(shared, own, counted=counted, scale=scale, digests=digests)
        replica = self._runner.grid.replica
        self._played = [counted[at] for at in shared.shares[replica]], shared.schedules[replica]
        self._number += 1
        self._last_s = time.perf_counter() - began
        return losses

    @without_fast_paths()
    def evaluate(self, microbatches: Microbatches) -> Tensor:
        """Runs the forwards of microbatches alone, without gradients; call ``model.eval()`` before, as in any loop.

        Gradients of earlier steps, and the step that ``ahead`` has announced, stay as they are.

        Args:
            microbatches: Any number of them; the same on every rank.

        Returns:
            The loss of each microbatch, on every rank.

        Raises:
            ValueError, InvalidScheduleError, RankFailedError: As in ``step``.
        """
        own, counted, digests = self._prepare(microbatches)
        shared = self._schedules.forwards(counted)
        with torch.no_grad():
            losses, _ = self._runner.run(shared, own, counted=counted, is_training=False, digests=digests)
        return losses

    def ahead(self, loader: Iterable[Microbatches]) -> Iterator[Microbatches]:
        """Yields the steps of a loader, and reads each one before the one ahead of it runs.

        The schedule of the next step is then searched in a process beside this one, on at most half of the cores. The
        best schedule so far runs when its turn comes.
        """
        steps = iter(loader)
        following = next(steps, None)
        while following is not None:
            now, following = following, next(steps, None)
            self._next = following
            yield now

    @property
    def plan(self) -> PipelinePlan:
        """The present plan as plain data; ``mosaic.pipeline(..., plan=)`` takes it in a later start."""
        return self._planner.plan

    def parameters(self) -> Iterable[nn.Parameter]:
        """Returns the parameters that are on this rank."""
        return [parameter for parameter in self._model.parameters() if not parameter.is_meta]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all ranks so that their norm is at most ``max_norm``; returns the norm before.

        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does the same.
        """
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, norm_type)

    def metrics(self) -> dict[str, float]:
        """Returns times of the last step and of the plans that were tried, and the number of known schedules.

        ``computing_ms`` and ``waiting_ms`` are this rank's in the last step: its tasks, and waits for messages of other
        ranks. ``failed_ahead`` counts steps whose planning ahead failed, on rank 0.
        """
        computing_ns = sum(end - start for cell, start, end in self._spans if cell[0].isdigit())
        waiting_ns = sum(end - start for cell, start, end in self._spans if cell.startswith(_WAITS))
        times = {"computing_ms": computing_ns / 1e6, "waiting_ms": waiting_ns / 1e6}
        tried = {f"trial_ms/{name}": ms for name, ms in self.trial.step_ms.items()}
        counts = {"schedules": float(len(self._schedules)), "failed_ahead": float(self._schedules.failed_ahead)}
        return {"step_ms": 1e3 * self._last_s, **times, **counts, **tried}

    def describe(self) -> str:
        """Returns the plan, the trial it comes from, and the chunks of each rank, as text."""
        replicas = "" if self.degrees.data == 1 else f", {self.degrees.data} replicas of {self.degrees.pipeline}"
        widths = self.degrees.tensor_by_place or (self.degrees.tensor,)
        replicas += "" if self.degrees.tensor == 1 else f", {' and '.join(map(str, widths))} ranks a layer"
        replicas += "" if self.degrees.context == 1 else f", {self.degrees.context} ranks a sequence"
        lines = [f"{self._planner.plan.name} on {self.world.size} ranks{replicas}"]
        lines += [f"tried at the start: {name} {ms:.1f} ms per step" for name, ms in self.trial.step_ms.items()]
        lines += [f"not tried: {name}: {reason}" for name, reason in self.trial.reasons.items()]
        for place in range(self.partition.num_ranks):
            chunks = describe_lanes(self.partition, place)
            ranks = self._runner.grid.holders([place])
            lines.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {chunks}")
        seen = self._planner.request.microbatches
        if self._counted.split.encoders and any(isinstance(each, CountedMicrobatch) and each.draws for each in seen):
            lines.append("encoders take whole microbatches, since these draw random numbers: pieces would draw others")
        for name in sorted(self._counted.split.dependent):
            lines.append(
                f"{name} takes whole microbatches: what it returns for a part of one is not a part of its result"
            )
        if self._planner.request.slots_per_rank == 1 and COLOCATED not in self.trial.reasons:
            lines.append("no lanes: each rank has one slot")
        return "\n".join(lines)

    def timeline(self) -> PlayedStep:
        """Returns the last step, as measured on the ranks of this one's replica and as simulated; every rank calls it.

        ``mosaic.report.pipeline_picture.draw_pipelines`` draws both on one axis of time.

        Raises:
            ValueError: No step has run, or this rank's replica had no microbatches.
        """
        if not self._number:
            raise ValueError("no step has run; call timeline() after step()")
        measured = gather_spans(self._spans, self._runner.grid.transport)
        microbatches, schedule = self._played
        if schedule is None:
            raise ValueError("this rank's replica had no microbatches in the last step; ask another rank")
        graph, timed = self._planner.simulate(microbatches, schedule)
        own = [measured[str(TaskName.of(task))] for task in graph.tasks]
        tasks = (replace(task, time_ns=end - start) for task, (start, end) in zip(graph.tasks, own, strict=True))
        first = min(start for start, _ in own)
        return PlayedStep(
            measured=(replace(graph, tasks=tuple(tasks)), [start - first for start, _ in own]),
            simulated=(graph, timed.start_ns),
        )

    def remove(self, *, gather: bool = True) -> None:
        """Makes the model plain and whole again; every rank calls it. Calling it again does nothing.

        Parameters stay the same objects. An optimizer has no state yet for those that were not on its rank, and slices
        of state for those that ranks shared.

        Args:
            gather: Whether to bring the parameters together, for which every rank must have memory. Otherwise the model
                keeps the weights that are here, and refuses to be called if some are not.
        """
        if not self.active:
            return
        self.active = False
        loops.leave(self)
        try:
            self.finish_saving()
            if gather:
                if self._slices is not None:
                    self._slices.rejoin()
                holders = _holders(self._model, self.world)
                take_back(self._model, lambda name, tensor: self.world.copy_of(tensor, holders[name][0]))
        finally:
            self._schedules.close()
            if self._sequences is not None:
                self._sequences.remove()
            self._grids.close()
            self.world.close()

    def _prepare(self, microbatches: Microbatches) -> tuple[Microbatches, list[CountedMicrobatch], Digests]:
        """Checks microbatches; returns this rank's part of them, their counts, and digests.

        Ranks agree on each new kind of step before it runs, and on the values of every step with its losses.
        """
        microbatches = listed(microbatches)
        if not self.active:
            raise ValueError("the pipeline was removed; call the model itself, or make another pipeline")
        if self._lacks_weights:
            raise ValueError("the model was on the meta device; give it weights by pipe.load_weights or pipe.load")
        modes = self._modes.now()
        if modes != self._checked_modes:
            check_model(self._model)
            self._checked_modes = modes
        self._runner.state.begin()
        own, counted = self._setup.cut(microbatches), []
        for at, microbatch in enumerate(own):
            try:
                counted.append(self._counted.microbatch(microbatch))
            except Exception as error:  # of any kind: the model's own
                error.add_note(f"the model cannot take microbatch {at} of {len(microbatches)}: {_text(microbatch)}")
                raise
        if self._slices is not None:
            check_draws(any(each.draws for each in counted))
        digests = digests_of(microbatches, own, counted)
        if (kind := (digests["shapes"], digests["masks"])) not in self._kinds:
            check_alike(self._runner.grid.transport.all_gather(digests))
            self._kinds = {kind} | (self._kinds if len(self._kinds) < MAX_KINDS else set())
        return own, counted, digests

    def _announce(self) -> None:
        """Starts planning the next step while this one runs."""
        following, self._next = self._next, None
        if following is None:
            return
        if self._sequences is not None:
            self._sequences.look_ahead(following)

        def count() -> list[CountedMicrobatch]:
            return self._setup.count(self._setup.cut(following))

        self._schedules.announce(self._number + 1, count, last_s=self._last_s)

    def _made_whole(self, state: SavedState | None = None) -> AbstractContextManager[None]:
        if self._slices is None:
            return nullcontext()
        beside = () if state is None else state.companions.values()
        optimizers = () if state is None else state.optimizers.values()
        return self._slices.whole([self._model, *beside], optimizers)

    def _plan_name(self) -> str:
        return "pipeline of " + " x ".join(
            str(getattr(self.degrees, axis)) for axis in ("data", "pipeline", "context", "tensor")
        )


def _text(microbatch: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {TensorSpec.of(value) if isinstance(value, Tensor) else type(value).__name__}"
        for name, value in microbatch.items()
    )


_REMEDY = (
    "pipe.step() trains and pipe.evaluate() gives losses. pipe.save(), pipe.export() and pipe.digest(), called on "
    "every rank, have the whole model's weights, and pipe.remove() brings them here. A sum over parameters in a loss "
    "is the optimizer's weight_decay"
)


def stand_for_others(model: nn.Module, world: World) -> None:
    """Replaces tensors of other ranks by stand-ins, which raise an error when they are read or pickled.

    Parameters stay the same objects; every rank calls it.
    """
    holders = _holders(model, world)
    with swappable(model):
        for name, tensor in tensors_of(model):
            if not tensor.is_meta:
                continue
            home = Home(name=name, ranks=holders[name], remedy=_REMEDY)
            if isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, Elsewhere.of(tensor, home, is_parameter=True))
            else:
                prefix, _, short = name.rpartition(".")
                model.get_submodule(prefix)._buffers[short] = Elsewhere.of(tensor, home)


def _holders(model: nn.Module, world: World) -> dict[str, tuple[int, ...]]:
    """Returns for each tensor the ranks that have its values."""
    names_of = world.all_gather([name for name, tensor in tensors_of(model) if not tensor.is_meta])
    holders: dict[str, tuple[int, ...]] = {}
    for rank, names in enumerate(names_of):
        for name in names:
            holders[name] = (*holders.get(name, ()), rank)
    return holders
