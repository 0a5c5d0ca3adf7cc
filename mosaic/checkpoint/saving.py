"""Saving while training goes on: the step waits for a copy in memory, and a thread writes it to the disk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.checkpoint.folder import (
    MODEL,
    RANDOM,
    STATE,
    FileEntry,
    Manifest,
    SavingPlace,
    TensorEntry,
    is_full,
    write_flushed,
)
from mosaic.checkpoint.ranks import Ranks, gather_objects, run_on_all
from mosaic.checkpoint.state import OneOrSeveral, OptimizerState, SavedState, random_state, to_plain
from mosaic.checkpoint.tensors import SUFFIX, describe, write_tensors
from mosaic.errors import MosaicError, NoRoomError

_LOG = logging.getLogger(__name__)

NICENESS = 10
"""Of the writing thread: beside a computing thread on the same core it gets a tenth of the core."""

_Layout: TypeAlias = tuple[dict[str, TensorEntry], list[str], dict[str, tuple[list[list[str]], dict[str, Any]]]]
"""A rank's tensors, the names of all tensors on any rank, and each optimizer's groups and states."""


class Saver:
    """Saves one checkpoint after another; the next one waits until the last one is on the disk.

    Args:
        ranks: The ranks that save together; all make the same calls.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layouts: tuple[list[str], list[_Layout]] | None = None
        self._pending: tuple[SavingPlace, Future[None]] | None = None

    def save(
        self, state: SavedState, folder: Path, *, step: int, extra: Mapping[str, Any], keep: int = 3, plan: str = ""
    ) -> Path:
        """Begins a checkpoint and returns its folder; see ``Checkpointer.save``."""
        self.finish()
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; keep at least 1")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r} is not a count of steps; use a whole number from 0 on")
        ranks, rank = self._ranks, self._ranks.rank
        part = run_on_all(ranks, lambda: _Part.of(state, extra))
        layouts = self._agree(step, str(folder), part)
        writer = _writers(layouts)
        place = ranks.broadcast(run_on_all(ranks, lambda: None if rank else SavingPlace.make(folder, step)))
        assert place is not None
        tensors = self._copies({name: part.tensors[name] for name in part.tensors if writer[name] == rank})
        text = json.dumps(to_plain(random_state(state.generators), "the random state")).encode()
        tensors[f"{RANDOM}{rank}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        contents = None if rank else _contents(step, part, layouts, plan)
        # A pool's thread is joined at the end of the process, as a checkpoint has to be.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=_lower_priority)
        self._pending = place, thread.submit(_write, tensors, place, rank, ranks.background_group(), contents, keep)
        thread.shutdown(wait=False)
        return place.final

    def finish(self) -> None:
        """Waits until the pending checkpoint is on the disk.

        Raises:
            MosaicError: It could not be written. Earlier checkpoints are unchanged.
        """
        if self._pending is None:
            return
        (place, future), self._pending = self._pending, None
        if (error := future.exception()) is not None:
            kind = NoRoomError if isinstance(error, NoRoomError) else MosaicError
            raise kind(_failure(place, error)) from error

    def _agree(self, step: int, folder: str, part: _Part) -> list[_Layout]:
        """Checks that all ranks save the same; gathers their layouts only where one differs from the last save's."""
        settings = {label: json.dumps([each.kind, *each.settings]) for label, each in part.optimizers.items()}
        digest = hashlib.sha256(repr(part.layout).encode()).hexdigest()
        requests = self._ranks.all_gather((step, folder, part.labels, settings, digest))
        subjects = ("steps", "folders", "optimizers, companions or generators", "settings of their optimizers")
        for index, subject in enumerate(subjects):
            if any(request[index] != requests[0][index] for request in requests):
                each = "; ".join(f"rank {rank}: {request[index]}" for rank, request in enumerate(requests))
                raise ValueError(f"the ranks save different {subject} ({each}); save the same on all ranks")
        digests = [request[-1] for request in requests]
        if self._layouts is None or self._layouts[0] != digests:
            self._layouts = digests, self._ranks.all_gather(part.layout)
        return self._layouts[1]

    def _copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns copies that training does not touch, valid until the next call; pinned for tensors on a GPU.

        Later copies reuse the memory: fresh memory takes several times as long as copying into it.
        """
        starts = list(itertools.accumulate((-(-each.nbytes // 64) * 64 for each in tensors.values()), initial=0))
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if self._memory.numel() < starts[-1] or (devices and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=bool(devices))
        copies = {}
        for start, (name, tensor) in zip(starts, tensors.items(), strict=False):
            flat = self._memory[start : start + tensor.nbytes].view(tensor.dtype)
            copies[name] = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One rank's part of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    """Not copied yet."""
    layout: _Layout
    optimizers: dict[str, OptimizerState]
    rest: dict[str, Any]
    """Everything except tensors and optimizers, as plain data."""
    tied: dict[str, str]
    labels: tuple[list[str], ...]
    """Names of optimizers, companions and generators."""

    @staticmethod
    def of(state: SavedState, extra: Mapping[str, Any]) -> _Part:
        modules = state.modules()
        tensors = {f"{prefix}{name}": tensor for prefix, each in modules.items() for name, tensor in each.here.items()}
        optimizers = {}
        for label, optimizer in state.optimizers.items():
            optimizers[label], own = OptimizerState.of(optimizer, modules[MODEL], label)
            tensors |= own
        schedulers = {
            label: to_plain(each.state_dict(), f"scheduler {label}".strip()) for label, each in state.schedulers.items()
        }
        companions, generators = list(state.companions or {}), list(state.generators or {})
        return _Part(
            tensors=tensors,
            layout=(
                {name: describe(name, tensor) for name, tensor in tensors.items()},
                [f"{prefix}{name}" for prefix, each in modules.items() for name in each.tensors],
                {label: (each.groups, each.states) for label, each in optimizers.items()},
            ),
            optimizers=optimizers,
            rest={
                **_by_label("scheduler", schedulers),
                "scaler": None if state.scaler is None else to_plain(state.scaler.state_dict(), "scaler"),
                "companions": companions,
                "generators": generators,
                "extra": to_plain(dict(extra), "extra"),
            },
            tied=modules[MODEL].tied,
            labels=([*optimizers], companions, generators),
        )


def _writers(layouts: Sequence[_Layout]) -> dict[str, int]:
    """Returns the rank that writes each tensor: ranks that have the same tensors take turns, the largest first.

    Raises:
        MosaicError: Two ranks have different tensors of one name, or no rank has a tensor.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    entries: dict[str, TensorEntry] = {}
    for rank, (own, _, _) in enumerate(layouts):
        for name, entry in own.items():
            if (first := entries.setdefault(name, entry)) != entry:
                raise MosaicError(
                    f"{name} is {entry.dtype} {list(entry.shape)} on rank {rank} and {first.dtype} {list(first.shape)} "
                    f"on rank {holders[name][0]}; all ranks have to hold the same"
                )
            holders[name].append(rank)
    if missing := [name for name in layouts[0][1] if name not in entries]:
        raise MosaicError(f"no rank has {missing[0]} (and {len(missing) - 1} more); it cannot be saved")
    largest_first = sorted(holders, key=lambda name: (-entries[name].num_bytes, name))
    return {name: holders[name][index % len(holders[name])] for index, name in enumerate(largest_first)}


def _contents(step: int, part: _Part, layouts: Sequence[_Layout], plan: str) -> tuple[Manifest, bytes]:
    """Returns the manifest, still without files and tensors, and the state file with the optimizers of all ranks."""
    from mosaic import __version__

    optimizers = {}
    for label, own in part.optimizers.items():
        by_rank = [optimizers_of_rank[label] for _, _, optimizers_of_rank in layouts]
        groups = zip(*(groups for groups, _ in by_rank), strict=True)
        optimizers[label] = replace(
            own,
            groups=[list(dict.fromkeys(itertools.chain(*same))) for same in groups],
            states={name: state for _, states in by_rank for name, state in states.items()},
        ).to_json()
    manifest = Manifest(
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        mosaic=__version__,
        torch=torch.__version__,
        num_ranks=len(layouts),
        plan=plan,
        files=(),
        tensors=(),
        tied=part.tied,
    )
    return manifest, (json.dumps({**_by_label("optimizer", optimizers), **part.rest}) + "\n").encode()


def _by_label(kind: str, states: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a state file for optimizers or schedulers: a single one, or several by name."""
    return {kind: states.get(""), f"{kind}s": {label: state for label, state in states.items() if label}}


def _lower_priority() -> None:
    """Lowers the priority of this thread, which hashes and copies a whole checkpoint, below training."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):  # forbidden here: it is only slower
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _write(
    tensors: Mapping[str, torch.Tensor],
    place: SavingPlace,
    rank: int,
    group: Any,
    contents: tuple[Manifest, bytes] | None,
    keep: int,
) -> None:
    """Writes this rank's file, and on rank 0 the rest; a failure is logged at once, even if the loop never waits."""

    def write_own() -> tuple[FileEntry, list[TensorEntry]]:
        if not place.aside.is_dir():
            raise MosaicError(f"rank 0 made {place.aside}, and it is not there on this rank")
        name = f"rank-{rank:05d}{SUFFIX}"
        entries = [replace(describe(key, tensor), file=name) for key, tensor in tensors.items()]
        num_bytes, sha256 = write_tensors(place.aside / name, entries, tensors.__getitem__)
        return FileEntry(name=name, num_bytes=num_bytes, sha256=sha256), entries

    def complete() -> None:
        if contents is None:
            return
        manifest, state = contents
        sha256 = write_flushed(state, place.aside / STATE)
        files = [FileEntry(name=STATE, num_bytes=len(state), sha256=sha256), *(file for file, _ in written)]
        entries = sorted((entry for _, own in written for entry in own), key=lambda entry: entry.name)
        replace(manifest, files=tuple(files), tensors=tuple(entries)).write(place.aside)
        place.commit(keep)

    try:
        written = _gather(group, write_own)
        _gather(group, complete)
    except Exception as error:  # of any kind: it is raised again
        _LOG.error(_failure(place, error))
        if rank == 0:
            place.abandon()
        raise


def _gather(group: Any, work: Any) -> list[Any]:
    """Gathers the results of all ranks; raises on all if one failed: NoRoomError if its disk was full."""
    report: tuple[str | None, bool, Any]
    try:
        report = None, False, work()
    except Exception as error:  # of any kind: all ranks have to raise
        report = f"{type(error).__name__}: {error}", is_full(error), None
    reports = gather_objects(group, report)
    if failures := [f"{reason} (rank {rank})" for rank, (reason, _, _) in enumerate(reports) if reason is not None]:
        raise (NoRoomError if any(full for _, full, _ in reports) else MosaicError)("; ".join(failures))
    return [result for _, _, result in reports]


def _failure(place: SavingPlace, error: BaseException) -> str:
    reason = str(error) if isinstance(error, MosaicError) else f"{type(error).__name__}: {error}"
    return (
        f"{place.final} could not be saved: {reason}; earlier ones are intact: make room, or choose a folder that all "
        "ranks can write"
    )


def room_needed(
    model: nn.Module, optimizer: OneOrSeveral[Optimizer] = None, companions: Mapping[str, nn.Module] | None = None
) -> int:
    """Estimates the bytes of a checkpoint of all ranks.

    Before its first step an optimizer counts as one with two numbers for each number of a parameter (three with
    ``amsgrad``), which is what AdamW keeps and more than most others do; SGD has one with momentum, and none without.
    """
    state = SavedState(model=model, optimizer=optimizer, companions=companions)
    sizes = [tensor.nbytes for module in state.modules().values() for tensor in module.tensors.values()]
    for each in state.optimizers.values():
        inner = getattr(each, "optimizer", each)  # accelerate wraps
        for group in inner.param_groups:
            numbers = 2 + bool(group.get("amsgrad"))
            if isinstance(inner, torch.optim.SGD):
                numbers = int(group["momentum"] != 0)
            for parameter in group["params"]:
                if own := inner.state.get(parameter):
                    sizes += [value.nbytes for value in own.values() if hasattr(value, "nbytes")]
                elif parameter.requires_grad:
                    sizes.append(numbers * parameter.nbytes + 8)  # and its count of steps
    return sum(sizes) + (2 + len(sizes) // 100) * 2**16  # names, settings and ``extra``
