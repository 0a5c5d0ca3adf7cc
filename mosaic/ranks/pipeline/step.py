"""A step of a pipeline on this rank, from top to bottom: ``PipelineRunner.run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mosaic.artifact import fingerprint
from mosaic.errors import InvalidScheduleError, RankFailedError, UnsplittableError
from mosaic.find.random_numbers import Generator, generator_state
from mosaic.find.restore import same
from mosaic.find.structure import version_of
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.layers import CountedMicrobatch
from mosaic.pipelining.plan import PipelinePlan
from mosaic.pipelining.planner import SharedStep
from mosaic.ranks.pipeline.chunk_work import ChunkWork, Microbatches, Scale, StepData
from mosaic.ranks.pipeline.executor import Span
from mosaic.ranks.pipeline.gradient_sums import GradientSums
from mosaic.ranks.pipeline.lanes import check_lanes, lane_pairs, open_lanes
from mosaic.ranks.pipeline.sequences import SharedItems, masks_of
from mosaic.ranks.pipeline.setup import PipelineSetup


class WatchedState:
    """Numbers, generators and buffers of modules that the sample's forward did not write to: larger batches may."""

    def __init__(self, model: nn.Module, split: ModelSplit) -> None:
        writers = tuple(f"{site.path}." for site in split.sites if site.path and site.has_effects)
        tables = [(path, vars(each)) for path, each in model.named_modules() if not f"{path}.".startswith(writers)]
        self._buffers = [(path, table["_buffers"]) for path, table in tables]
        self._values = [
            (path, table, key)
            for path, table in tables
            for key, value in table.items()
            if type(value) in (int, float) or isinstance(value, Generator)
        ]
        self.begin()

    def begin(self) -> None:
        self._before = self._now()

    def changed(self) -> str:
        """Returns the name of one that was changed since ``begin``, or nothing; puts back the values before."""
        now = self._now()
        names = [".".join(filter(None, key)) for key in now if not same(now[key], self._before.get(key))]
        if names:
            for (_, name), (table, value, _) in self._before.items():
                table[name] = value
        return next(iter(names), "")

    def _now(self) -> dict[tuple[str, str], Any]:
        now: dict[tuple[str, str], Any] = {}
        now |= {(p, name): (t, b, b if b is None else version_of(b)) for p, t in self._buffers for name, b in t.items()}
        for path, table, name in self._values:
            value = table.get(name)
            state = generator_state(value) if isinstance(value, Generator) else 0
            now[path, name] = (table, value, state.tolist() if isinstance(state, Tensor) else str(state))
        return now


class PipelineRunner:
    """Runs steps of one plan on this rank: drops the weights that the rank does not need, and opens its lanes.

    With ``keeps_all`` weights of other ranks stay, for other plans, unless they have no memory yet.
    """

    def __init__(self, setup: PipelineSetup, plan: PipelinePlan, *, keeps_all: bool) -> None:
        model, counted, partition = setup.model, setup.counted, plan.partition
        check_lanes(model, counted.split, plan)
        self.grid = grid = setup.grids.of(plan.degrees)
        self._setup, self._partition = setup, partition
        own = [index for index, chunk in enumerate(partition.chunks) if chunk.rank == grid.place]
        has_memory = not any(parameter.is_meta for parameter in model.parameters())
        self.parted = PartedModel(
            model,
            counted.split,
            [chunk.parts for chunk in partition.chunks],
            None if keeps_all and has_memory else own,
            keeps_buffers=keeps_all,
        )
        if setup.slices is not None:
            setup.slices.forget_dropped()
        with self.parted.lent_memory():
            self.sums = GradientSums(model, counted.split, partition, grid, setup.slices)
        self._items = None if grid.context_group is None else SharedItems(self.parted, grid.context_group)
        self.state = WatchedState(model, counted.split)
        counted.numbers.add_follower(self.parted)
        self._lanes = open_lanes(setup.backend, partition, grid.place)
        grid.transport.open_lanes(lane_pairs(partition, counted.split.feeds))

    def run(
        self,
        shared: SharedStep,
        microbatches: Microbatches,
        *,
        counted: Sequence[CountedMicrobatch],
        scale: Scale | None = None,
        is_training: bool = True,
        digests: Digests | None = None,
    ) -> tuple[Tensor, Sequence[Span]]:
        """Runs a step forward and backward; returns its losses, and the actions of this rank.

        All ranks call it, and compare their microbatches' digests at its end.
        """
        transport, replica = self.grid.transport, self.grid.replica
        share, schedule = shared.shares[replica], shared.schedules[replica]

        # 1. The plain loop's random numbers before each microbatch, whatever the order of the schedule.
        draws = [each.draws for each in counted]
        states = self._setup.counted.numbers.before_each(microbatches, draws)

        # 2. Gradients of earlier steps of weights with a part on several ranks: they are summed already.
        if is_training:
            self.sums.begin()

        # 3. This rank's actions: forwards, backwards, messages, and sums of chunks that are done.
        spans: Sequence[Span] = ()
        losses: dict[int, float] = {}
        if schedule is not None:
            data = StepData(
                split=self._setup.counted.split,
                partition=self._partition,
                schedule=schedule,
                microbatches=[microbatches[at] for at in share],
                layers=self._setup.counted.layers,
                averaged_over=len(microbatches) / self.grid.num_copies,
                units_together=self._setup.counted.units_together,
                items=None if any(draws) else self._items,
            )
            work = ChunkWork(
                self.parted,
                self._setup.loss,
                data,
                states=[states[at] for at in share],
                scale=scale,
                reduce=self.sums.start,
            )
            with transport.progress.explaining():
                named = "; ".join(counted[at].key for at in share)
                spans = self.grid.executor.run(schedule, work, shapes=named, lanes=self._lanes)
            if self.grid.tensor == 0:
                losses = {share[at]: float(loss) for at, loss in work.losses.items()}

        # 4. The rest of the gradients.
        if is_training:
            try:
                self.sums.finish()
                if self._setup.slices is not None:
                    self._setup.slices.check_once()
            except RankFailedError:
                raise
            except BaseException as error:
                transport.abort(f"failed in summing gradients: {type(error).__name__}: {error}")
                raise

        # 5. Losses on every rank; ranks that share a sequence have a part of its loss each.
        gathered = transport.all_gather((losses, digests, self.state.changed()))
        if digests is not None:
            check_alike([theirs for _, theirs, _ in gathered])
        if changed := next((name for *_, name in gathered if name), None):
            raise UnsplittableError(
                f"{changed} changes with one of these microbatches, and did not with the sample; chunks run in another "
                "order, each on its rank: call the model with the largest microbatch before mosaic.pipeline, or do not "
                "keep it"
            )
        total = [0.0] * len(microbatches)
        for at, loss in (item for theirs, *_ in gathered for item in theirs.items()):
            total[at] += loss
        return torch.tensor(total), spans


def listed(step: Any) -> list[Mapping[str, Any]]:
    microbatches = [*step] if isinstance(step, Iterable) and not isinstance(step, Mapping) else []
    if not microbatches or not all(isinstance(each, Mapping) for each in microbatches):
        raise ValueError(f"a step is a list of microbatches, dicts of the model's arguments, and not {str(step)[:60]}")
    return microbatches


Digests = Mapping[str, str]
"""Hashes of the shapes, the values and the masks of a step's microbatches."""


def digests_of(microbatches: Microbatches, own: Microbatches, counted: Sequence[CountedMicrobatch]) -> Digests:
    """Returns the digests that ranks compare: other microbatches would give wrong gradients without an error."""
    values = []
    for at, microbatch in enumerate(microbatches):
        for path, leaf in pytree.tree_leaves_with_path(dict(microbatch)):
            name = pytree.keystr(path)
            if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} of microbatch {at} requires a gradient, which other ranks than those of the first layers "
                    "would not have; compute it in the model, or detach() it"
                )
            values.append((name, _comparable(leaf)))
    compared = {"shapes": [each.key for each in counted], "values": values, "masks": masks_of(own)}
    return {name: fingerprint(value) for name, value in compared.items()}


def check_alike(digests: Sequence[Digests]) -> None:
    """Raises InvalidScheduleError, on all ranks, where a rank has other microbatches than rank 0."""
    for rank, theirs in enumerate(digests):
        for name, digest in theirs.items():
            if digest != digests[0][name]:
                raise InvalidScheduleError(
                    f"microbatches of rank {rank} have other {name} than rank 0's; give all ranks the same microbatches"
                )


def _comparable(leaf: Any) -> Any:
    """Returns a value that has to be the same on all ranks; None for tensors on GPUs, and objects."""
    if isinstance(leaf, Tensor):
        return torch.hash_tensor(leaf).view(torch.int64).item() if leaf.device.type == "cpu" else None
    return leaf if isinstance(leaf, str | int | float | None) else None
