"""The ranks that train a day: one alone, several among which Mosaic divides the model, a pipeline, or exact copies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.checkpoint.ranks import Ranks, Told, tell_in
from mosaic.engine.options import RankSettings
from mosaic.errors import MosaicError
from mosaic.ranks.world.world import World
from mosaic.train.data.loader import BatchCut
from mosaic.train.tree_sum import ExactStep


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A rank's parts of a step's loss, on their way from the device while the next step is launched."""

    parts: torch.Tensor
    """One for each micro-batch, on the host."""
    arrived: torch.cuda.Event | None
    """When they are there; None where they are."""


class Crew:
    """One process that trains alone, or one of several whose gradients the handle averages.

    Args:
        device: Where this rank trains.
        rank: This one.
        size: How many there are.

    Attributes:
        ranks: Who saves together where there is no handle; None for this process alone.
        scale: What losses are multiplied with, so that gradients add up to those of the mean over the global batch.
        reads_all: Whether each rank has the whole global batch and not a part of it.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.size = size
        self.ranks: Ranks | None = None
        self.scale = float(size)
        self.reads_all = size == 1
        self._group: Any = None

    def begin(self, model: nn.Module, cut: BatchCut) -> None:
        """Called once the model's parameters are where they will be."""

    def micro_batch(self, index: int) -> AbstractContextManager[None]:
        """Surrounds forward and backward of a micro-batch, by its index in the global batch."""
        return nullcontext()

    def finish(self) -> None:
        """Called after the last micro-batch of a step; then all gradients are those of the global batch."""

    def leave(self) -> None:
        """Called when all is done."""

    def moved(self, batch: Any) -> Any:
        """Returns a batch with its tensors where this rank trains."""
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Returns for each flag whether it is set on any rank."""
        return self.agree(flags, None)[0]

    def agree(self, flags: tuple[bool, ...], loss: StepLoss | None) -> tuple[tuple[bool, ...], float | None]:
        """Returns for each flag whether it is set on any rank, and a step's loss over the global batch.

        Both in one message between ranks. A loss is summed in one order on any number of ranks.
        """
        parts = torch.empty(0)
        if loss is not None:
            if loss.arrived is not None:
                loss.arrived.synchronize()
            parts = loss.parts
        every = [torch.cat((torch.tensor(flags, dtype=parts.dtype), parts))]
        if self.size > 1:
            mine, every = every[0], [torch.empty_like(every[0]) for _ in range(self.size)]
            dist.all_gather(every, mine, group=self._small_group())
        told = torch.stack(every)
        mean = None if loss is None else float(told[:, len(flags) :].reshape(-1).sum())
        return tuple(told[:, : len(flags)].any(0).tolist()), mean

    def broadcast(self, value: Told) -> Told:
        """Returns the value of rank 0."""
        return self.gather(value)[0]

    def gather(self, value: Told) -> list[Told]:
        """Returns the value of each rank."""
        return tell_in(self._small_group() if self.size > 1 else None, value)

    def first_does(self, work: Callable[[], object]) -> None:
        """Has rank 0 do something, and all wait for it; where it fails, all raise."""
        error = None
        if self.rank == 0:
            try:
                work()
            except Exception as failure:  # of any kind: the others have to hear of it
                error = failure
        said = self.broadcast(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if said is not None:
            raise MosaicError(f"rank 0: {said}")

    @contextmanager
    def shared_folder(self, parent: Path | None = None, *, prefix: str = "mosaic-") -> Iterator[Path]:
        """A folder of all ranks that is thrown away at the end of the block."""
        with ExitStack() as stack:
            own = ""
            if self.rank == 0:
                own = stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=prefix))
            yield Path(self.broadcast(own))
            self.broadcast(None)  # everyone is done with it

    def bring(self, losses: list[torch.Tensor]) -> StepLoss:
        """Begins to bring this rank's parts of a step's loss to the host; waits for nothing."""
        parts = (torch.stack([loss.float() for loss in losses]) / self.scale).to("cpu", non_blocking=True)
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return StepLoss(parts, arrived)

    def mean_loss(self, loss: StepLoss) -> float:
        """Returns a step's loss over the global batch."""
        mean = self.agree((), loss)[1]
        assert mean is not None
        return mean

    def _small_group(self) -> Any:
        """Ranks on CPUs, whom a few numbers are told."""
        if self._group is None:
            if not dist.is_initialized():
                World.join(self.device)
            self._group = dist.new_group(backend="gloo")
        return self._group


class PipelineCrew(Crew):
    """Ranks that have some layers each, and the same batches."""

    def __init__(self, device: torch.device, rank: int, size: int) -> None:
        super().__init__(device, rank, size)
        self.scale = 1.0
        self.reads_all = True
        self._world = World.join(device, watch=RankSettings())
        self.ranks = self._world

    def bring(self, losses: list[torch.Tensor]) -> StepLoss:
        """Takes the losses of all micro-batches, which every rank has: those of rank 0 count."""
        parts = torch.stack([loss.float() for loss in losses]).cpu() / len(losses)
        return StepLoss(parts if self.rank == 0 else torch.zeros_like(parts), None)

    def gather(self, value: Told) -> list[Told]:
        """Returns the value of each rank."""
        return self._world.all_gather(value)

    def leave(self) -> None:
        """Tells the other ranks that this one is done."""
        self._world.close()

    def _small_group(self) -> Any:
        return self._world.agreements


class ExactCrew(Crew):
    """Ranks that have the whole model each and add gradients in one order: their number changes no bit."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        super().__init__(device, rank, size)
        self.scale = 1.0
        self._world = World.join(device) if size > 1 else None
        self.ranks = self._world
        self._step: ExactStep | None = None

    def begin(self, model: nn.Module, cut: BatchCut) -> None:
        """Prepares the sums."""
        self._step = ExactStep(model, cut)

    def micro_batch(self, index: int) -> AbstractContextManager[None]:
        """Takes the gradients of the block as those of one micro-batch."""
        assert self._step is not None
        return self._step.micro_batch(index)

    def finish(self) -> None:
        """Adds all of them up."""
        assert self._step is not None
        self._step.finish()

    def leave(self) -> None:
        """Tells the other ranks that this one is done."""
        if self._world is not None:
            self._world.close()
