"""The worker group that trains a day: one rank, several colocated ranks, or a pipeline."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mosaic.checkpoint.ranks import Ranks, T, gather_objects
from mosaic.engine.options import RankSettings
from mosaic.errors import MosaicError
from mosaic.ranks.world.world import World


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A rank's parts of a step's loss; the copy to the host overlaps the launch of the next step."""

    parts: torch.Tensor
    """One per micro-batch, on the host."""
    arrived: torch.cuda.Event | None
    """End of the copy; None if it is done."""


class WorkerGroup:
    """One process that trains alone, or one rank of several whose gradients the handle averages.

    Attributes:
        ranks: The ranks that save together without a handle; None for one process.
        scale: Factor of the losses that makes gradients add up to those of the mean over the global batch.
        reads_all: True if each rank reads the whole global batch.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.size = size
        self.ranks: Ranks | None = None
        self.scale = float(size)
        self.reads_all = size == 1
        self._group: Any = None

    def leave(self) -> None:
        """Called at the end."""

    def moved(self, batch: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        return self.agree(flags, None)[0]

    def agree(self, flags: tuple[bool, ...], loss: StepLoss | None) -> tuple[tuple[bool, ...], float | None]:
        """Returns the flags that any rank has set, and a step's loss over the global batch.

        One message between ranks carries both. The order of the loss's sum does not depend on the number of ranks.
        """
        parts = torch.empty(0)
        if loss is not None:
            if loss.arrived is not None:
                loss.arrived.synchronize()
            parts = loss.parts
        gathered = [torch.cat((torch.tensor(flags, dtype=parts.dtype), parts))]
        if self.size > 1:
            local, gathered = gathered[0], [torch.empty_like(gathered[0]) for _ in range(self.size)]
            dist.all_gather(gathered, local, group=self._small_group())
        stacked = torch.stack(gathered)
        mean = None if loss is None else float(stacked[:, len(flags) :].reshape(-1).sum())
        return tuple(stacked[:, : len(flags)].any(0).tolist()), mean

    def broadcast(self, value: T) -> T:
        return self.gather(value)[0]

    def gather(self, value: T) -> list[T]:
        return gather_objects(self._small_group() if self.size > 1 else None, value)

    def first_does(self, work: Callable[[], object]) -> None:
        """Runs ``work`` on rank 0 while the others wait; if it fails, all ranks raise."""
        error = None
        if self.rank == 0:
            try:
                work()
            except Exception as failure:  # of any kind: the other ranks raise it too
                error = failure
        failure_text = self.broadcast(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if failure_text is not None:
            raise MosaicError(f"rank 0: {failure_text}")

    @contextmanager
    def shared_folder(self, parent: Path | None = None, *, prefix: str = "mosaic-") -> Iterator[Path]:
        """A folder that all ranks share until the end of the block."""
        with ExitStack() as stack:
            folder = ""
            if self.rank == 0:
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=prefix))
            yield Path(self.broadcast(folder))
            self.broadcast(None)  # all ranks are done with it

    def bring(self, losses: list[torch.Tensor]) -> StepLoss:
        """Starts to copy this rank's parts of a step's loss to the host; does not wait."""
        parts = (torch.stack([loss.float() for loss in losses]) / self.scale).to("cpu", non_blocking=True)
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return StepLoss(parts, arrived)

    def mean_loss(self, loss: StepLoss) -> float:
        mean = self.agree((), loss)[1]
        assert mean is not None
        return mean

    def _small_group(self) -> Any:
        """A group on CPUs for a few numbers."""
        if self._group is None:
            if not dist.is_initialized():
                World.join(self.device)
            self._group = dist.new_group(backend="gloo")
        return self._group


class PipelineGroup(WorkerGroup):
    """Ranks of a pipeline: each has some layers, and all read the same batches."""

    def __init__(self, device: torch.device, rank: int, size: int) -> None:
        super().__init__(device, rank, size)
        self.scale = 1.0
        self.reads_all = True
        self._world = World.join(device, watch=RankSettings())
        self.ranks = self._world

    def bring(self, losses: list[torch.Tensor]) -> StepLoss:
        """Keeps the losses of all micro-batches on rank 0 only, because every rank has them."""
        parts = torch.stack([loss.float() for loss in losses]).cpu() / len(losses)
        return StepLoss(parts if self.rank == 0 else torch.zeros_like(parts), None)

    def gather(self, value: T) -> list[T]:
        return self._world.all_gather(value)

    def leave(self) -> None:
        self._world.close()

    def _small_group(self) -> Any:
        return self._world.agreements
