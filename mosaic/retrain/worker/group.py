"""The worker group that trains a day: one rank, several colocated ranks, or a pipeline."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mosaic.checkpoint.ranks import gather_objects
from mosaic.engine.options import RankSettings
from mosaic.errors import MosaicError
from mosaic.ranks.world.world import World

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A rank's part of a step's loss; the copy to the host overlaps the launch of the next step."""

    part: torch.Tensor
    """On the host."""
    arrived: torch.cuda.Event | None
    """End of the copy; None if it is done."""


class WorkerGroup:
    """One process that trains alone, or one rank of several, by torchrun's variables.

    Attributes:
        world: The ranks of a pipeline; None for colocated ranks, whose handle has a world of its own.
        scale: Factor of the losses that makes gradients add up to those of the mean over the global batch.
        reads_all: True if each rank reads the whole global batch, as in a pipeline.
    """

    def __init__(self, device: torch.device, *, pipeline: bool = False) -> None:
        self.device = device
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        pipeline = pipeline and self.size > 1
        self.world = World.join(device, watch=RankSettings()) if pipeline else None
        self.scale = 1.0 if pipeline else float(self.size)
        self.reads_all = pipeline or self.size == 1
        self._group: Any = None

    def leave(self) -> None:
        if self.world is not None:
            self.world.close()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    def moved(self, batch: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)

    def bring(self, losses: list[torch.Tensor]) -> StepLoss:
        """Starts to copy this rank's part of a step's loss to the host; does not wait."""
        part = (torch.stack([loss.double() for loss in losses]).sum() / self.scale).to("cpu", non_blocking=True)
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return StepLoss(part, arrived)

    def agree(self, flags: tuple[bool, ...], loss: StepLoss | None) -> tuple[tuple[bool, ...], float | None]:
        """Returns each flag that any rank has set, and the mean loss of a step over all ranks."""
        local = torch.tensor([*flags, 0.0], dtype=torch.float64)
        if loss is not None:
            if loss.arrived is not None:
                loss.arrived.synchronize()
            if self.rank == 0 or not self.reads_all:  # else rank 0 has the same losses
                local[-1] = loss.part
        if self.size > 1:
            dist.all_reduce(local, group=self._cpu_group())
        return tuple(value > 0 for value in local[:-1].tolist()), None if loss is None else float(local[-1])

    def mean_loss(self, loss: StepLoss) -> float:
        mean = self.agree((), loss)[1]
        assert mean is not None
        return mean

    def gather(self, value: _T) -> list[_T]:
        if self.world is not None:
            return self.world.all_gather(value)
        return gather_objects(self._cpu_group() if self.size > 1 else None, value)

    def on_first(self, work: Callable[[], _T]) -> _T:
        """Runs ``work`` on rank 0 while the others wait; returns its result on all ranks, or raises on all."""
        result = error = None
        if self.rank == 0:
            try:
                result = work()
            except Exception as failure:  # of any kind: the other ranks raise it too
                error = failure
        failure_text = None if error is None else f"{type(error).__name__}: {error}"
        result, failure_text = self.gather((result, failure_text))[0]
        if error is not None:
            raise error
        if failure_text is not None:
            raise MosaicError(f"rank 0: {failure_text}")
        return result  # type: ignore[return-value]  # there is no error

    @contextmanager
    def shared_folder(self, parent: Path | None = None, *, prefix: str = "mosaic-") -> Iterator[Path]:
        """A folder that all ranks share until the end of the block."""
        with ExitStack() as stack:
            folder = ""
            if self.rank == 0:
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=prefix))
            yield Path(self.gather(folder)[0])
            self.gather(None)  # all ranks are done with it

    def _cpu_group(self) -> Any:
        """A group on CPUs for a few numbers."""
        if self.world is not None:
            return self.world.agreements
        if self._group is None:
            if not dist.is_initialized():
                World.join(self.device)
            self._group = dist.new_group(backend="gloo")
        return self._group
