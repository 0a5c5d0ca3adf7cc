"""Saving while training goes on: the step waits for a copy in memory, and a thread writes it to the disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mosaic.checkpoint.belongings import Belongings
from mosaic.checkpoint.folder import SavingPlace
from mosaic.checkpoint.manifest import MODEL, RANDOM, Manifest
from mosaic.checkpoint.optimizer_state import OptimizerState, collect
from mosaic.checkpoint.plain_data import to_plain
from mosaic.checkpoint.random_state import random_state
from mosaic.checkpoint.ranks import Ranks
from mosaic.checkpoint.room import bytes_of_all
from mosaic.checkpoint.shared_layout import RankLayout, SharedLayout
from mosaic.checkpoint.tensor_file import TensorSpec
from mosaic.checkpoint.writing import Contents, Copies, Writing
from mosaic.errors import MosaicError


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest(Belongings):
    """Arguments of a save."""

    folder: Path
    """The run's checkpoints."""
    step: int
    """The loop's count."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Plain data, saved by rank 0."""
    keep: int = 3
    """Number of checkpoints that stay in the folder."""
    plan: str = ""
    """Fingerprint of the plan that runs."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep={self.keep} would leave no checkpoint; keep at least 1")
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise ValueError(f"step={self.step!r} is not a count of steps; use a whole number from 0 on")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One rank's share of a save."""

    tensors: dict[str, torch.Tensor]
    layout: RankLayout
    tied: dict[str, str]
    optimizers: dict[str, OptimizerState]
    rest: dict[str, Any]
    """Everything except tensors and optimizers."""

    @staticmethod
    def of(job: SaveRequest) -> _Share:
        modules = job.modules()
        model = modules[MODEL]
        tensors = {f"{prefix}{name}": tensor for prefix, each in modules.items() for name, tensor in each.here.items()}
        optimizers = {}
        for label, optimizer in job.optimizers.items():
            optimizers[label], more = collect(optimizer, model, label)
            tensors.update(more)
        layout = RankLayout(
            tensors={name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()},
            names=tuple(f"{prefix}{name}" for prefix, each in modules.items() for name in each.tensors),
            groups={label: each.groups for label, each in optimizers.items()},
            states={label: each.states for label, each in optimizers.items()},
        )
        schedulers = {
            label: to_plain(each.state_dict(), f"scheduler {label}".strip()) for label, each in job.schedulers.items()
        }
        rest = {
            **_by_name("scheduler", schedulers),
            "scaler": None if job.scaler is None else to_plain(job.scaler.state_dict(), "scaler"),
            "companions": list(job.companions or {}),
            "generators": list(job.generators or {}),
            "extra": to_plain(dict(job.extra), "extra"),
        }
        return _Share(tensors=tensors, layout=layout, tied=model.tied, optimizers=optimizers, rest=rest)


class Saver:
    """Saves one checkpoint after another; the next one waits until the last one is on the disk.

    Args:
        ranks: The ranks that save together; all make the same calls.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._writing: Writing | None = None
        self._layout: tuple[list[str], SharedLayout] | None = None
        self._copies = Copies()

    def prepare(self, belongings: Belongings) -> None:
        """Allocates memory for the copies: the first save then takes no longer than later ones."""
        pinned = any(tensor.is_cuda for tensor in belongings.model.parameters())
        self._copies.reserve(bytes_of_all(belongings) // self._ranks.size, pinned=pinned)

    def save(self, job: SaveRequest) -> Path:
        """Begins a checkpoint and returns its folder.

        Raises:
            MosaicError: The previous save failed, the folder cannot be written, or the ranks differ.
            TypeError: A value cannot be saved; names it.
        """
        self.finish()
        share, error = None, None
        try:
            share = _Share.of(job)
        except Exception as failure:  # of any kind, from the user's objects: all ranks have to raise
            error = failure
        self._ranks.raise_if_any_failed(error)
        assert share is not None
        layout = self._agreed(job, share)
        place = self._place(job)
        tensors = self._copies.of({name: share.tensors[name] for name in layout.writes[self._ranks.rank]})
        tensors[f"{RANDOM}{self._ranks.rank}"] = _random_bytes(job.generators)
        contents = _contents(job, share, layout, self._ranks.size) if self._ranks.rank == 0 else None
        self._writing = Writing(tensors, place, contents, self._ranks)
        return place.final

    def finish(self) -> None:
        """Waits until the pending checkpoint is on the disk.

        Raises:
            MosaicError: It could not be written. Earlier checkpoints are unchanged.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        writing.wait()

    def _agreed(self, job: SaveRequest, share: _Share) -> SharedLayout:
        """Checks that all ranks save the same, and returns the tensors that each writes."""
        settings = {label: json.dumps([entry.kind, *entry.settings]) for label, entry in share.optimizers.items()}
        beside = [*settings], share.rest["companions"], share.rest["generators"]
        requests = self._ranks.all_gather((job.step, str(job.folder), beside, settings, _hash(share.layout)))
        for rank, entry in enumerate(each[3] for each in requests):
            if bool(entry) != bool(requests[0][3]):
                without = 0 if entry else rank
                raise ValueError(f"rank {without} saves no optimizer and others do; pass it on all ranks")
        for what, index in (("steps", 0), ("folders", 1), ("optimizers, companions or generators", 2)):
            if any(each[index] != requests[0][index] for each in requests):
                each = "; ".join(f"rank {rank}: {entry[index]}" for rank, entry in enumerate(requests))
                raise ValueError(f"the ranks save different {what} ({each}); save the same on all ranks")
        for rank, entry in enumerate(each[3] for each in requests):
            if entry != requests[0][3]:
                raise ValueError(
                    f"the settings of rank {rank}'s optimizer are {entry} and those of rank 0's {requests[0][3]}; they "
                    "have to be the same on all ranks"
                )
        hashes = [each[-1] for each in requests]
        if self._layout is None or self._layout[0] != hashes:
            self._layout = hashes, SharedLayout.of(self._ranks.all_gather(share.layout))
        return self._layout[1]

    def _place(self, job: SaveRequest) -> SavingPlace:
        place, error = None, None
        if self._ranks.rank == 0:
            try:
                place = SavingPlace.make(job.folder, job.step)
            except MosaicError as failure:
                error = failure
        self._ranks.raise_if_any_failed(error)
        place = self._ranks.broadcast(place)
        assert place is not None
        return place


def _contents(job: SaveRequest, share: _Share, layout: SharedLayout, num_ranks: int) -> Contents:
    from mosaic import __version__

    optimizers = {
        label: {**each.to_json(), "groups": layout.groups[label], "states": layout.states[label]}
        for label, each in share.optimizers.items()
    }
    state = {**_by_name("optimizer", optimizers), **share.rest}
    manifest = Manifest(
        step=job.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        mosaic=__version__,
        torch=torch.__version__,
        num_ranks=num_ranks,
        plan=job.plan,
        files=(),
        tensors=(),
        tied=share.tied,
    )
    return Contents(manifest=manifest, state=state, keep=job.keep)


def _by_name(what: str, states: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a state file for optimizers or schedulers: a single one, or several by name."""
    return {what: states.get(""), f"{what}s": {label: state for label, state in states.items() if label}}


def _random_bytes(generators: Mapping[str, torch.Generator] | None) -> torch.Tensor:
    text = json.dumps(to_plain(random_state(generators), "the random state")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _hash(layout: RankLayout) -> str:
    return hashlib.sha256(repr(layout).encode()).hexdigest()
