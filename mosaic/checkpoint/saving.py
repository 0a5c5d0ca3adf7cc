"""Saving while training goes on: the step waits for a copy in memory, and a thread of torch's writes it to the disk."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from mosaic.checkpoint.alone import save_alone
from mosaic.checkpoint.dtypes import entry_of
from mosaic.checkpoint.folder import Place
from mosaic.checkpoint.manifest import MODEL, Manifest
from mosaic.checkpoint.model_tensors import ModelTensors
from mosaic.checkpoint.optimizer_state import OptimizerState, collect, merged_groups
from mosaic.checkpoint.plain_data import to_plain
from mosaic.checkpoint.random_state import random_state
from mosaic.checkpoint.ranks import Ranks
from mosaic.checkpoint.sharing import shares
from mosaic.checkpoint.storage import Contents, Writer
from mosaic.errors import MosaicError

_LOG = logging.getLogger(__name__)
RANDOM = "random."


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be saved."""

    model: nn.Module
    """The model, of which this rank may have a part."""
    folder: Path
    """The run's checkpoints."""
    step: int
    """The loop's count."""
    optimizer: Optimizer | None
    """Its state, by parameter."""
    scheduler: Any
    """Anything with a ``state_dict()`` of plain data, the same on every rank."""
    extra: Mapping[str, Any]
    """Plain data; rank 0's is kept."""
    keep: int
    """How many checkpoints stay in the folder."""
    plan: str
    """Fingerprint of the plan that runs."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep={self.keep} would leave no checkpoint; keep at least 1")
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise ValueError(f"step={self.step!r} is no count of steps; give a whole number from 0 on")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank has of a job."""

    tensors: dict[str, torch.Tensor]
    layout: dict[str, Any]
    tied: dict[str, str]
    optimizer: OptimizerState | None
    scheduler: Any
    extra: Any

    @staticmethod
    def of(job: Job) -> _Part:
        model = ModelTensors.of(job.model)
        tensors = {f"{MODEL}{name}": tensor for name, tensor in model.here.items()}
        optimizer = None
        if job.optimizer is not None:
            optimizer, more = collect(job.optimizer, model)
            tensors.update(more)
        scheduler = to_plain(job.scheduler.state_dict(), "scheduler") if job.scheduler is not None else None
        return _Part(
            tensors=tensors,
            layout=_layout(tensors, [f"{MODEL}{name}" for name in model.tensors], optimizer),
            tied=model.tied,
            optimizer=optimizer,
            scheduler=scheduler,
            extra=to_plain(dict(job.extra), "extra"),
        )


def _layout(tensors: Mapping[str, torch.Tensor], names: list[str], optimizer: OptimizerState | None) -> dict[str, Any]:
    """Returns what stays the same from save to save under one plan."""
    entries = {name: entry_of(name, tensor) for name, tensor in tensors.items()}
    return {
        "tensors": {name: (entry.num_bytes, entry.dtype, entry.shape) for name, entry in entries.items()},
        "names": names,
        "groups": None if optimizer is None else optimizer.groups,
        "states": {} if optimizer is None else optimizer.states,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Who has what, over all ranks."""

    writes: tuple[frozenset[str], ...]
    groups: list[list[str]] | None
    states: dict[str, Any]

    @staticmethod
    def of(told: list[dict[str, Any]]) -> _Layout:
        known: dict[str, tuple[int, Any]] = {}
        for rank, each in enumerate(told):
            for name, described in each["tensors"].items():
                first, found = known.setdefault(name, (rank, described))
                if found != described:
                    raise MosaicError(
                        f"{name} is {described[1]} {list(described[2])} on rank {rank} and {found[1]} "
                        f"{list(found[2])} on rank {first}; all ranks have to hold the same"
                    )
        lost = [name for each in told for name in each["names"] if name not in known]
        if lost:
            raise MosaicError(f"no rank has {lost[0]} (and {len(set(lost)) - 1} more); it cannot be saved")
        groups = [each["groups"] for each in told]
        return _Layout(
            writes=shares([{name: found[0] for name, found in each["tensors"].items()} for each in told]),
            groups=None if groups[0] is None else merged_groups(groups),
            states={name: state for each in told for name, state in each["states"].items()},
        )


class _Copies:
    """Copies tensors to memory that training does not touch; DCP calls it before ``async_save`` returns."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the copies."""
        return {
            kind: {name: torch.empty_like(tensor, device="cpu").copy_(tensor) for name, tensor in tensors.items()}
            for kind, tensors in state_dict.items()
        }

    def synchronize_staging(self) -> None:
        """Does nothing: the copies were waited for."""

    def close(self) -> None:
        """Does nothing."""


class _Running:
    """A checkpoint that is being written by torch's thread."""

    def __init__(self, future: Future[Any], place: Place, *, is_first: bool) -> None:
        self._future = future
        self._place = place
        self._is_first = is_first
        self._told = threading.Event()
        future.add_done_callback(self._ended)

    def wait(self) -> None:
        """Waits until it is on the disk; raises MosaicError if it could not be written."""
        self._told.wait()
        error = self._future.exception()
        if error is not None:
            raise MosaicError(self._failure(error)) from error

    def _ended(self, done: Future[Any]) -> None:
        """Says at once that it failed, and leaves nothing half-written, though nobody may ever wait for it."""
        try:
            error = done.exception()
            if error is not None:
                _LOG.error(self._failure(error))
                if self._is_first:
                    self._place.abandon()
        finally:
            self._told.set()

    def _failure(self, error: BaseException) -> str:
        reasons = _reasons(error) if isinstance(error, CheckpointException) else f"{type(error).__name__}: {error}"
        return (
            f"{self._place.final} could not be saved: {reasons}; those before it are whole: make room, or give a "
            "folder that all ranks can write"
        )


class Saver:
    """Saves one checkpoint after another; the next one waits until the last one is on the disk.

    Args:
        ranks: Who saves together. All of them make the same calls.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._running: _Running | None = None
        self._layout: tuple[tuple[str, ...], _Layout] | None = None

    def save(self, job: Job) -> Path:
        """Begins a checkpoint and returns where it will be.

        Raises:
            MosaicError: The one before could not be written, the folder cannot be, or the ranks differ.
            TypeError: Something in it cannot be saved; names it.
        """
        self.finish()
        part, error = None, None
        try:
            part = _Part.of(job)
        except Exception as failure:  # of any kind, from the user's objects: all ranks have to hear of it
            error = failure
        self._ranks.all_or_none(error)
        assert part is not None
        layout = self._agreed(job, part)
        place = self._place(job)
        tensors = {name: part.tensors[name] for name in layout.writes[self._ranks.rank]}
        tensors[f"{RANDOM}{self._ranks.rank}"] = _random_bytes()
        contents = _contents(job, part, layout, self._ranks.size) if self._ranks.rank == 0 else None
        self._running = self._begin(tensors, place, contents)
        return place.final

    def finish(self) -> None:
        """Waits until what was begun is on the disk.

        Raises:
            MosaicError: It could not be written; says why. What was there before is as it was.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        running.wait()

    def _agreed(self, job: Job, part: _Part) -> _Layout:
        """Returns who writes what, once it is sure that all ranks save the same."""
        settings = None if part.optimizer is None else [part.optimizer.kind, *part.optimizer.settings]
        told = self._ranks.tell((job.step, str(job.folder), _hash(settings), _hash(part.layout)))
        for what, index in (("step", 0), ("folder", 1)):
            if len({each[index] for each in told}) > 1:
                each = "; ".join(f"rank {rank}: {found[index]}" for rank, found in enumerate(told))
                raise ValueError(f"the ranks save different {what}s ({each}); save the same on all ranks")
        if len({each[2] for each in told}) > 1:
            self._name_differing(settings)
        kinds = tuple(each[3] for each in told)
        if self._layout is None or self._layout[0] != kinds:
            self._layout = kinds, _Layout.of(self._ranks.tell(part.layout))
        return self._layout[1]

    def _name_differing(self, settings: list[Any] | None) -> None:
        told = self._ranks.tell(settings)
        if None in told:
            raise ValueError(f"rank {told.index(None)} gave no optimizer and others did; give it on all ranks")
        for rank, each in enumerate(told):
            if each != told[0]:
                raise ValueError(
                    f"the settings of rank {rank}'s optimizer are {each} and those of rank 0's {told[0]}; they have to "
                    "be the same on all ranks"
                )

    def _place(self, job: Job) -> Place:
        place, error = None, None
        if self._ranks.rank == 0:
            try:
                place = Place.make(job.folder, job.step)
            except MosaicError as failure:
                error = failure
        self._ranks.all_or_none(error)
        aside, final = self._ranks.first_says(None if place is None else (str(place.aside), str(place.final)))
        return Place(aside=Path(aside), final=Path(final))

    def _begin(self, tensors: dict[str, torch.Tensor], place: Place, contents: Contents | None) -> _Running:
        copies, writer = _Copies(), Writer(place, contents)
        if self._ranks.size == 1:
            return _Running(save_alone(copies.stage(_by_kind(tensors)), writer), place, is_first=True)
        future = async_save(
            _by_kind(tensors),
            storage_writer=writer,
            process_group=self._ranks.background_group(),
            async_stager=copies,  # type: ignore[arg-type]  # a protocol with more than is called
        )
        assert isinstance(future, Future)
        return _Running(future, place, is_first=self._ranks.rank == 0)


def _contents(job: Job, part: _Part, layout: _Layout, num_ranks: int) -> Contents:
    from mosaic import __version__

    optimizer = None
    if part.optimizer is not None:
        optimizer = {**part.optimizer.to_json(), "groups": layout.groups, "states": layout.states}
    state = {"optimizer": optimizer, "scheduler": part.scheduler, "extra": part.extra}
    manifest = Manifest(
        step=job.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        mosaic=__version__,
        torch=torch.__version__,
        num_ranks=num_ranks,
        plan=job.plan,
        files=(),
        tensors=(),
        tied=part.tied,
    )
    return Contents(manifest=manifest, state=json.dumps(state) + "\n", keep=job.keep)


def _by_kind(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Nests ``model.NAME``, which torch flattens again: it logs each entry at the top, slower than it is copied."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        found.setdefault(kind, {})[rest] = tensor
    return found


def _random_bytes() -> torch.Tensor:
    text = json.dumps(to_plain(random_state(), "the random state")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _reasons(error: CheckpointException) -> str:
    found = {f"{type(cause).__name__}: {cause} (rank {rank})" for rank, (cause, _) in error.failures.items()}
    return "; ".join(sorted(found))
