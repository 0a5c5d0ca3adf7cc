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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
from mosaic.checkpoint.ranks import Ranks, tell_in
from mosaic.checkpoint.state import OneOrSeveral, OptimizerState, SavedState, random_state, to_plain
from mosaic.checkpoint.tensors import SUFFIX, describe, write_tensors
from mosaic.errors import MosaicError, NoRoomError

_LOG = logging.getLogger(__name__)

NICENESS = 10
"""Of the writing thread: beside a computing thread on the same core it gets a tenth of the core."""

_BYTES_BESIDE = 1 << 16
"""Allowance for data other than tensors (names, settings, ``extra``), and again for each 100 tensors."""

_Layout = tuple[dict[str, TensorEntry], list[str], dict[str, tuple[list[list[str]], dict[str, Any]]]]
"""A rank's tensors, the names of all tensors on any rank, and each optimizer's groups and states."""


class Saver:
    """Saves one checkpoint after another; the next one waits until the last one is on the disk.

    Args:
        ranks: The ranks that save together; all make the same calls.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._copies = _Copies()
        self._merged: tuple[list[str], _Merged] | None = None
        self._pending: tuple[SavingPlace, Future[None]] | None = None

    def prepare(self, state: SavedState) -> None:
        """Allocates memory for the copies: the first save then takes no longer than later ones."""
        pinned = any(tensor.is_cuda for tensor in state.model.parameters())
        num_bytes = room_needed(state.model, state.optimizer, state.companions) // self._ranks.size
        self._copies.reserve(num_bytes, pinned=pinned)

    def save(
        self, state: SavedState, folder: Path, *, step: int, extra: Mapping[str, Any], keep: int = 3, plan: str = ""
    ) -> Path:
        """Begins a checkpoint and returns its folder; see ``KeepsCheckpoints.save``."""
        self.finish()
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; keep at least 1")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r} is not a count of steps; use a whole number from 0 on")
        part, error = None, None
        try:
            part = _Part.of(state, extra)
        except Exception as failure:  # of any kind, from the user's objects: all ranks have to raise
            error = failure
        self._ranks.raise_if_any_failed(error)
        assert part is not None
        merged = self._agree(step, str(folder), part)
        place = self._make_place(folder, step)
        rank = self._ranks.rank
        tensors = self._copies.of({name: part.tensors[name] for name in part.tensors if merged.writer[name] == rank})
        text = json.dumps(to_plain(random_state(state.generators), "the random state")).encode()
        tensors[f"{RANDOM}{rank}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        contents = _contents(step, part, merged, self._ranks.size, plan) if rank == 0 else None
        # A pool's thread is joined at the end of the process, as a checkpoint has to be.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=_lower_priority)
        group = self._ranks.background_group()
        self._pending = place, thread.submit(_write, tensors, place, rank, group, contents, keep)
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

    def _agree(self, step: int, folder: str, part: _Part) -> _Merged:
        """Checks that all ranks save the same; gathers their layouts only where one differs from the last save's."""
        settings = {label: json.dumps([each.kind, *each.settings]) for label, each in part.optimizers.items()}
        digest = hashlib.sha256(repr(part.layout).encode()).hexdigest()
        requests = self._ranks.all_gather((step, folder, part.labels, settings, digest))
        subjects = ("steps", "folders", "optimizers, companions or generators", "settings of their optimizers")
        for index, what in enumerate(subjects):
            if any(request[index] != requests[0][index] for request in requests):
                each = "; ".join(f"rank {rank}: {request[index]}" for rank, request in enumerate(requests))
                raise ValueError(f"the ranks save different {what} ({each}); save the same on all ranks")
        digests = [request[-1] for request in requests]
        if self._merged is None or self._merged[0] != digests:
            self._merged = digests, _Merged(self._ranks.all_gather(part.layout))
        return self._merged[1]

    def _make_place(self, folder: Path, step: int) -> SavingPlace:
        place, error = None, None
        if self._ranks.rank == 0:
            try:
                place = SavingPlace.make(folder, step)
            except MosaicError as failure:
                error = failure
        self._ranks.raise_if_any_failed(error)
        place = self._ranks.broadcast(place)
        assert place is not None
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One rank's part of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    """Not copied yet."""
    rest: dict[str, Any]
    """Everything except tensors and optimizers, as plain data."""
    specs: dict[str, TensorEntry]
    names: list[str]
    """All tensors of the model and its companions, on any rank."""
    tied: dict[str, str]
    optimizers: dict[str, OptimizerState]
    labels: tuple[list[str], ...]
    """Names of optimizers, companions and generators."""

    @property
    def layout(self) -> _Layout:
        return self.specs, self.names, {label: (each.groups, each.states) for label, each in self.optimizers.items()}

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
            rest={
                **_by_label("scheduler", schedulers),
                "scaler": None if state.scaler is None else to_plain(state.scaler.state_dict(), "scaler"),
                "companions": companions,
                "generators": generators,
                "extra": to_plain(dict(extra), "extra"),
            },
            specs={name: describe(name, tensor) for name, tensor in tensors.items()},
            names=[f"{prefix}{name}" for prefix, each in modules.items() for name in each.tensors],
            tied=modules[MODEL].tied,
            optimizers=optimizers,
            labels=([*optimizers], companions, generators),
        )


class _Merged:
    """The layouts of all ranks: their optimizers' states, and the rank that writes each tensor.

    Raises:
        MosaicError: Two ranks have different tensors of one name, or no rank has a tensor.
    """

    def __init__(self, layouts: Sequence[_Layout]) -> None:
        holders: dict[str, list[int]] = defaultdict(list)
        specs: dict[str, TensorEntry] = {}
        for rank, (own, _, _) in enumerate(layouts):
            for name, spec in own.items():
                if specs.setdefault(name, spec) != spec:
                    raise MosaicError(
                        f"{name} is {spec.dtype} {list(spec.shape)} on rank {rank} and {specs[name].dtype} "
                        f"{list(specs[name].shape)} on rank {holders[name][0]}; all ranks have to hold the same"
                    )
                holders[name].append(rank)
        if missing := [name for name in layouts[0][1] if name not in specs]:
            raise MosaicError(f"no rank has {missing[0]} (and {len(missing) - 1} more); it cannot be saved")
        self.writer = assign(holders, {name: spec.num_bytes for name, spec in specs.items()}, len(layouts))
        self.optimizers: dict[str, dict[str, Any]] = {}
        for label in layouts[0][2]:
            by_rank = [optimizers[label] for _, _, optimizers in layouts]
            groups = zip(*(own for own, _ in by_rank), strict=True)
            self.optimizers[label] = {
                "groups": [list(dict.fromkeys(itertools.chain(*same))) for same in groups],
                "states": {name: state for _, states in by_rank for name, state in states.items()},
            }


def assign(holders: Mapping[str, Sequence[int]], num_bytes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Returns the rank that writes each tensor, one that has it, such that all ranks write about as much.

    Tensors on a single rank come first, then the largest first, each to the rank with the least load so far.
    """
    load, writer = [0] * num_ranks, {}
    for name in sorted(holders, key=lambda name: (len(holders[name]) > 1, -num_bytes[name], name)):
        writer[name] = min(holders[name], key=lambda rank: (load[rank], rank))
        load[writer[name]] += num_bytes[name]
    return writer


def _contents(step: int, part: _Part, merged: _Merged, num_ranks: int, plan: str) -> tuple[Manifest, bytes]:
    """Returns the manifest, still without files and tensors, and the state file."""
    from mosaic import __version__

    states = {label: {**each.to_json(), **merged.optimizers[label]} for label, each in part.optimizers.items()}
    manifest = Manifest(
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        mosaic=__version__,
        torch=torch.__version__,
        num_ranks=num_ranks,
        plan=plan,
        files=(),
        tensors=(),
        tied=part.tied,
    )
    return manifest, (json.dumps({**_by_label("optimizer", states), **part.rest}) + "\n").encode()


def _by_label(what: str, states: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a state file for optimizers or schedulers: a single one, or several by name."""
    return {what: states.get(""), f"{what}s": {label: state for label, state in states.items() if label}}


class _Copies:
    """Copies of tensors in memory that training does not touch.

    Later copies reuse the memory: fresh memory takes several times as long as copying into it. It is pinned for tensors
    on a GPU.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int, *, pinned: bool) -> None:
        """Allocates the memory and touches its pages."""
        if self._grow(num_bytes, pinned=pinned):
            self._memory.zero_()

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns copies, valid until the next call."""
        starts = list(itertools.accumulate((-(-each.nbytes // 64) * 64 for each in tensors.values()), initial=0))
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._grow(starts[-1], pinned=bool(devices))
        copies = {}
        for start, (name, tensor) in zip(starts, tensors.items(), strict=False):
            flat = self._memory[start : start + tensor.nbytes].view(tensor.dtype)
            copies[name] = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _grow(self, num_bytes: int, *, pinned: bool) -> bool:
        is_short = self._memory.numel() < num_bytes or (pinned and not self._memory.is_pinned())
        if is_short:
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return is_short


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
    try:
        file, specs, failure = None, [], None
        try:
            if not place.aside.is_dir():
                raise MosaicError(f"rank 0 made {place.aside}, and it is not there on this rank")
            name = f"rank-{rank:05d}{SUFFIX}"
            specs = [replace(describe(key, tensor), file=name) for key, tensor in tensors.items()]
            num_bytes, sha256 = write_tensors(place.aside / name, specs, tensors.__getitem__)
            file = FileEntry(name=name, num_bytes=num_bytes, sha256=sha256)
        except Exception as error:  # of any kind: all ranks have to raise
            failure = error
        written, failure = _gather(group, failure, (file, specs)), None
        try:
            if contents is not None:
                _finish(place, *contents, written)
                place.commit(keep)
        except Exception as error:  # of any kind: all ranks have to raise
            failure = error
        _gather(group, failure, None)
    except Exception as error:  # of any kind: it is raised again
        _LOG.error(_failure(place, error))
        if rank == 0:
            place.abandon()
        raise


def _gather(group: Any, failure: Exception | None, value: Any) -> list[Any]:
    """Gathers values from all ranks; raises on all if one failed: NoRoomError if its disk was full."""
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    reports = tell_in(group, (reason, failure is not None and is_full(failure), value))
    if failed := [f"{report[0]} (rank {rank})" for rank, report in enumerate(reports) if report[0] is not None]:
        raise (NoRoomError if any(report[1] for report in reports) else MosaicError)("; ".join(failed))
    return [report[2] for report in reports]


def _finish(
    place: SavingPlace, manifest: Manifest, state: bytes, written: Iterable[tuple[FileEntry, list[TensorEntry]]]
) -> None:
    """Writes the state and the manifest."""
    state_file = FileEntry(name=STATE, num_bytes=len(state), sha256=write_flushed(state, place.aside / STATE))
    files, tensors = [state_file], []
    for file, specs in written:
        files.append(file)
        tensors += specs
    tensors.sort(key=lambda tensor: tensor.name)
    replace(manifest, files=tuple(files), tensors=tuple(tensors)).write(place.aside)


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
                own = inner.state.get(parameter)
                if own:
                    sizes += [value.nbytes for value in own.values() if hasattr(value, "nbytes")]
                elif parameter.requires_grad:
                    sizes.append(numbers * parameter.nbytes + 8)  # and its count of steps
    return sum(sizes) + _BYTES_BESIDE * (2 + len(sizes) // 100)
