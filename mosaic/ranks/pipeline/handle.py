"""A model that runs in a pipeline: steps of microbatches, and what a loop needs beside them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.checkpoint.methods import Checkpointer
from mosaic.checkpoint.state import SavedState
from mosaic.parts.finding.layer_lists import check_model
from mosaic.parts.modes import Modes
from mosaic.pipelining.layers import CountedMicrobatch
from mosaic.pipelining.plan import PipelinePlan
from mosaic.ranks.pipeline.beside.alike import PlainCalls, check_alike, trained_in
from mosaic.ranks.pipeline.beside.gathering import gather_model, stand_for_others
from mosaic.ranks.pipeline.beside.played_steps import OwnStep, PlayedStep, PlayedSteps
from mosaic.ranks.pipeline.beside.step_schedules import StepSchedules
from mosaic.ranks.pipeline.rank_lanes import describe_lanes
from mosaic.ranks.pipeline.transports.transport import TensorSpec
from mosaic.ranks.pipeline.trying.setup import PipelineSetup
from mosaic.ranks.pipeline.trying.trial import COLOCATED, PipelineTrial
from mosaic.ranks.running import loops
from mosaic.ranks.running.trace import trace_of

Step = Sequence[Mapping[str, Any]]
"""Microbatches, as keyword arguments of the model; the same on every rank."""


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

    def __init__(self, candidates: PipelineSetup, trial: PipelineTrial) -> None:
        self.world = candidates.world
        self.degrees = trial.best.degrees
        self.partition = trial.best.partition
        self.trial = trial
        self._model = candidates.model
        self._ranks = candidates.world
        self._grids = candidates.grids
        self._planner, self._slices, self._sequences = trial.best, candidates.slices, candidates.sequences
        self._runner = candidates.runner(trial.best, keeps_all=False)
        self._counted = replace(candidates.counted, numbers=self._runner.numbers)
        self._lacks_weights = bool(self._runner.parted.give_memory())
        stand_for_others(candidates.model, candidates.world)
        self._counted.whole.renew_stand_ins()
        self._schedules = StepSchedules(trial.best, candidates.world)
        self._next: Step | None = None
        self._number = 0
        self._last_s = 0.0
        self._played = PlayedSteps(trial.best, self._runner.grid.executor)
        self._modes = Modes(candidates.model)
        self._checked_modes = self._modes.now()
        hook = PlainCalls(candidates.counted.split.sites[0].path)
        self._plain_calls = candidates.model.register_forward_pre_hook(hook)
        self.active = True
        elsewhere = self._runner.sums.counted_elsewhere
        parameters = list(candidates.model.parameters())
        self._counted_here = {id(one): not one.is_meta and id(one) not in elsewhere for one in parameters}
        is_divided = self._runner.grid.num_copies < self.world.size
        self._divided = frozenset(map(id, parameters)) if is_divided else frozenset()
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
        self._check_ready(microbatches)
        began = time.perf_counter()
        own = self._cut(microbatches)
        counted = self._count(own)
        self._check_alike(microbatches, own, counted)
        shared = self._schedules.of(self._number, counted, last_s=self._last_s)
        self._announce()
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.world.device))  # ranks without a loss know the scale, too
        scale = None if scaler is None else scaler.scale
        number = self.world.progress.step
        ran = self._runner.run(shared, own, shapes=self._shapes(counted), scale=scale)
        replica = self._runner.grid.replica
        share = tuple(counted[at] for at in shared.shares[replica])
        self._played.note(OwnStep(number=number, step=share, schedule=shared.schedules[replica], times=ran.times))
        self._number += 1
        self._last_s = time.perf_counter() - began
        return ran.losses

    def evaluate(self, microbatches: Step) -> Tensor:
        """Runs the forwards of microbatches alone, without gradients; call ``model.eval()`` before, as in any loop.

        Gradients of earlier steps, and the step that ``ahead`` has announced, stay as they are.

        Args:
            microbatches: Any number of them; the same on every rank.

        Returns:
            The loss of each microbatch, on every rank.

        Raises:
            ValueError, InvalidScheduleError, RankFailedError: As in ``step``.
        """
        self._check_ready(microbatches)
        own = self._cut(microbatches)
        counted = self._count(own)
        self._check_alike(microbatches, own, counted)
        shared = self._schedules.forwards(counted)
        with torch.no_grad():
            return self._runner.run(shared, own, shapes=self._shapes(counted), is_training=False).losses

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
    def plan(self) -> PipelinePlan:
        """What runs, as plain data to be kept; ``mosaic.pipeline(..., plan=)`` takes it in a later start."""
        return self._planner.saved

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

        ``computing_ms`` and ``waiting_ms`` are this rank's in the last step: its tasks, and waits for messages of other
        ranks. ``failed_ahead`` counts steps whose planning ahead failed, on rank 0.
        """
        last = self._played.last
        own = {} if last is None else {"computing_ms": last.computing_ms, "waiting_ms": last.waiting_ms}
        tried = {f"trial_ms/{name}": ms for name, ms in self.trial.step_ms.items()}
        counts = {"schedules": float(len(self._schedules)), "failed_ahead": float(self._schedules.failed_ahead)}
        return {"step_ms": 1e3 * self._last_s, **own, **counts, **tried}

    def describe(self) -> str:
        """Says which way was taken and why, and which chunks are on which rank."""
        replicas = "" if self.degrees.data == 1 else f", {self.degrees.data} replicas of {self.degrees.pipeline}"
        replicas += "" if self.degrees.tensor == 1 else f", {self.degrees.tensor} ranks a layer"
        replicas += "" if self.degrees.context == 1 else f", {self.degrees.context} ranks a sequence"
        lines = [f"{self._planner.name} on {self.world.size} ranks{replicas}"]
        lines += [f"tried at the start: {name} {ms:.1f} ms a step" for name, ms in self.trial.step_ms.items()]
        lines += [f"not tried: {name}: {reason}" for name, reason in self.trial.reasons.items()]
        for place in range(self.partition.num_ranks):
            chunks = describe_lanes(self.partition, place)
            ranks = self._runner.grid.holders([place])
            lines.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {chunks}")
        seen = self._planner.request.microbatches
        if self._counted.split.encoders and any(isinstance(one, CountedMicrobatch) and one.draws for one in seen):
            lines.append("encoders take whole microbatches, since these draw random numbers: pieces would draw others")
        if self._planner.request.slots_per_rank == 1 and COLOCATED not in self.trial.reasons:
            lines.append("no lanes: each rank has one slot")
        return "\n".join(lines)

    def timeline(self) -> PlayedStep:
        """Returns the last step, as measured on the ranks of this one's replica and as simulated; every rank calls it.

        ``mosaic.report.pipeline_picture.draw_pipelines`` draws both on one axis of time.

        Raises:
            ValueError: No step has run, or this rank's replica had no microbatches.
        """
        return self._played.timeline()

    def write_trace(self, folder: str | Path) -> Path:
        """Writes what this rank computed and waited for in the last steps, at most 100; every rank calls it.

        ``mosaic doctor --trace FOLDER`` says from the files of all ranks which one is slow: whose layers take longer
        over planned times than those of others. Each opens in ui.perfetto.dev, too.

        Args:
            folder: Where to put ``trace-rankN.json``; ranks on several machines give one that all see, or copy files.

        Returns:
            The file of this rank.

        Raises:
            MosaicError: The folder cannot be written.
            RankFailedError: Another rank has failed; names it.
        """
        path = Path(folder) / f"trace-rank{self.world.rank}.json"
        trace_of(self._played.computed(), self.world).write(path)
        return path

    def remove(self, *, gather: bool = True) -> None:
        """Gives the plain, whole model back; every rank calls it. Calling it again does nothing.

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
                gather_model(self._model, self.world)
                self._plain_calls.remove()
        finally:
            self._schedules.close()
            if self._sequences is not None:
                self._sequences.remove()
            self._grids.close()
            self.world.close()

    def _check_ready(self, microbatches: Step) -> None:
        """Raises ValueError or UnsplittableError where nothing can run yet."""
        if not microbatches:
            raise ValueError("no microbatches; a step has at least one")
        if self._lacks_weights:
            raise ValueError("the model was on the meta device; give it weights by pipe.load_weights or pipe.load")
        trained = [f"{name} of microbatch {at}" for at, one in enumerate(microbatches) for name in trained_in(one)]
        if trained and torch.is_grad_enabled():
            raise ValueError(
                f"{trained[0]} requires a gradient, which other ranks than those of the first layers would not have; "
                "compute it in the model, or detach() it"
            )
        modes = self._modes.now()
        if modes != self._checked_modes:
            check_model(self._model)
            self._checked_modes = modes

    def _cut(self, microbatches: Step) -> Step:
        """Returns what this rank calls the model with: of sequences that ranks share, its own tokens."""
        return microbatches if self._sequences is None else [self._sequences.cut(one) for one in microbatches]

    def _check_alike(self, microbatches: Step, own: Step, counted: Sequence[CountedMicrobatch]) -> None:
        check_alike(microbatches, own, self._shapes(counted), self._runner.grid.transport)

    def _announce(self) -> None:
        """Has the next step planned while this one runs."""
        following, self._next = self._next, None
        if following is None:
            return
        if self._sequences is not None:
            self._sequences.look_ahead(following)

        def count() -> list[CountedMicrobatch]:
            return [self._counted.microbatch(one) for one in self._cut(following)]

        self._schedules.announce(self._number + 1, count, last_s=self._last_s)

    def _count(self, microbatches: Step) -> list[CountedMicrobatch]:
        """Works out what the microbatches are to planning; an error of the model's says which one it cannot take."""
        counted = []
        for at, one in enumerate(microbatches):
            try:
                counted.append(self._counted.microbatch(one))
            except Exception as error:
                error.add_note(f"the model cannot take microbatch {at} of {len(microbatches)}: {_text(one)}")
                raise
        return counted

    def _shapes(self, counted: Sequence[CountedMicrobatch]) -> list[str]:
        """Names the shapes of a step's messages: those of its microbatches, and what autocast makes of them."""
        kind = self.world.device.type
        precision = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "as they are"
        return [f"{one.key} {precision}" for one in counted]

    def _made_whole(self, state: SavedState | None = None) -> AbstractContextManager[None]:
        if self._slices is None:
            return nullcontext()
        beside = () if state is None else (state.companions or {}).values()
        optimizers = () if state is None else state.optimizers.values()
        return self._slices.whole([self._model, *beside], optimizers)

    def _plan_name(self) -> str:
        return "pipeline of " + " x ".join(
            str(getattr(self.degrees, axis)) for axis in ("data", "pipeline", "context", "tensor")
        )


def _text(microbatch: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {TensorSpec.of(one) if isinstance(one, Tensor) else type(one).__name__}"
        for name, one in microbatch.items()
    )
