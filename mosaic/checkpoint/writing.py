"""A thread writes a checkpoint during training: each rank its file, rank 0 the state and the manifest."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from mosaic.checkpoint.disk import is_full, write_flushed
from mosaic.checkpoint.folder import SavingPlace
from mosaic.checkpoint.manifest import MANIFEST, STATE, FileEntry, Manifest, TensorEntry
from mosaic.checkpoint.ranks import Ranks, tell_in
from mosaic.checkpoint.tensor_file import SUFFIX, TensorSpec, write_tensors
from mosaic.errors import MosaicError, NoRoomError

_LOG = logging.getLogger(__name__)


NICENESS = 10
"""Of the writing thread: beside a computing thread on the same core it gets a tenth of the core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Rank 0's additions to the tensors."""

    manifest: Manifest
    """Without files and tensors."""
    state: dict[str, Any]
    """Everything except tensors, as plain data."""
    keep: int
    """Number of checkpoints that stay."""


class Copies:
    """Copies of tensors in memory that training does not touch.

    Later copies reuse the memory: fresh memory takes several times as long as copying into it. It is pinned for tensors
    on a GPU.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int, *, pinned: bool) -> None:
        """Allocates the memory and touches its pages."""
        if self._grow(num_bytes, pinned=pinned):
            self._room.zero_()

    def _grow(self, num_bytes: int, *, pinned: bool) -> bool:
        is_short = self._room.numel() < num_bytes or (pinned and not self._room.is_pinned())
        if is_short:
            self._room = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._room = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return is_short

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns copies, valid until the next call."""
        ends = list(itertools.accumulate(_aligned(tensor.nbytes) for tensor in tensors.values()))
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._grow(ends[-1] if ends else 0, pinned=bool(devices))
        copies = {}
        for end, (name, tensor) in zip(ends, tensors.items(), strict=True):
            start = end - _aligned(tensor.nbytes)
            flat = self._room[start : start + tensor.nbytes].view(tensor.dtype)
            copies[name] = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _give_way() -> None:
    """Lowers the priority of this thread, which hashes and copies a whole checkpoint, below training."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):  # forbidden here: it is only slower
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Writing:
    """A checkpoint being written by its own thread; the process waits for it when it ends.

    Args:
        tensors: This rank's tensors; copies that stay unchanged.
        place: The folder, the same for all ranks.
        contents: The rest; on rank 0 only.
        ranks: The ranks that write together.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], place: SavingPlace, contents: Contents | None, ranks: Ranks
    ) -> None:
        self._place = place
        self._contents = contents
        self._rank = ranks.rank
        self._group = ranks.background_group()
        self._done = threading.Event()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=_give_way)
        self._future = thread.submit(self._write, tensors)
        thread.shutdown(wait=False)
        self._future.add_done_callback(self._ended)

    def wait(self) -> None:
        """Waits until the checkpoint is on the disk; raises MosaicError if it could not be written."""
        self._done.wait()
        error = self._future.exception()
        if error is not None:
            kind = NoRoomError if isinstance(error, NoRoomError) else MosaicError
            raise kind(self._failure(error)) from error

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        file, specs, failure = None, [], None
        try:
            if not self._place.aside.is_dir():
                raise MosaicError(f"rank 0 made {self._place.aside}, and it is not there on this rank")
            specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
            name = f"rank-{self._rank:05d}{SUFFIX}"
            num_bytes, sha256 = write_tensors(self._place.aside / name, specs, tensors.__getitem__)
            file = FileEntry(name=name, num_bytes=num_bytes, sha256=sha256)
        except Exception as error:  # of any kind: all ranks have to raise
            failure = error
        written = self._all_fine(failure, file, specs)
        failure = None
        try:
            if self._contents is not None:
                self._finish(self._contents, written)
        except Exception as error:
            failure = error
        self._all_fine(failure)

    def _all_fine(self, failure: Exception | None, *entries: Any) -> list[tuple[Any, ...]]:
        """Gathers ``entries`` from all ranks; raises on all if one failed: NoRoomError if its disk was full."""
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        reports = tell_in(self._group, (reason, failure is not None and is_full(failure), entries))
        failed = [f"{each[0]} (rank {rank})" for rank, each in enumerate(reports) if each[0] is not None]
        if failed:
            raise (NoRoomError if any(each[1] for each in reports) else MosaicError)("; ".join(failed))
        return [each[2] for each in reports]

    def _finish(self, contents: Contents, written: list[tuple[FileEntry, list[TensorSpec]]]) -> None:
        """Writes the state and the manifest, and renames the folder."""
        state = (json.dumps(contents.state) + "\n").encode()
        sha256 = write_flushed(state, self._place.aside / STATE)
        tensors = [
            TensorEntry(name=spec.name, dtype=spec.dtype, shape=spec.shape, file=file.name)
            for file, specs in written
            for spec in specs
        ]
        manifest = replace(
            contents.manifest,
            files=(FileEntry(name=STATE, num_bytes=len(state), sha256=sha256), *(file for file, _ in written)),
            tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
        ).sealed()
        write_flushed(manifest.to_json().encode(), self._place.aside / MANIFEST)
        self._place.commit(contents.keep)

    def _ended(self, done: Future[None]) -> None:
        """Logs a failure at once and removes the partial folder, even if the loop never waits."""
        try:
            error = done.exception()
            if error is not None:
                _LOG.error(self._failure(error))
                if self._rank == 0:
                    self._place.abandon()
        finally:
            self._done.set()

    def _failure(self, error: BaseException) -> str:
        reason = str(error) if isinstance(error, MosaicError) else f"{type(error).__name__}: {error}"
        return (
            f"{self._place.final} could not be saved: {reason}; earlier ones are intact: make room, or choose a "
            "folder that all ranks can write"
        )
