"""Loading a checkpoint into a model that is colocated under any plan: each rank reads what it has room for."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mosaic.checkpoint.belongings import Belongings
from mosaic.checkpoint.folder import Checkpoint, choose, damage_of
from mosaic.checkpoint.manifest import MODEL, RANDOM, STATE, Manifest, TensorEntry
from mosaic.checkpoint.model_tensors import Overlap
from mosaic.checkpoint.optimizer_state import adapted, check_fits, restore, some, targets
from mosaic.checkpoint.plain_data import from_plain, to_plain
from mosaic.checkpoint.random_state import set_random_state
from mosaic.checkpoint.ranks import Ranks
from mosaic.checkpoint.tensor_file import open_tensors
from mosaic.errors import InvalidCheckpointError, MosaicError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Content of a checkpoint beside the model's state, and the differences after a partial load."""

    step: int
    """The step that it was saved at."""
    extra: dict[str, Any]
    """``extra`` of rank 0."""
    path: Path
    """Its folder."""
    new: tuple[str, ...] = ()
    """Tensors that only the model has, unchanged."""
    gone: tuple[str, ...] = ()
    """Tensors that only the checkpoint has."""
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Shape and dtype of differing tensors in the checkpoint and in the model, which stay unchanged."""
    notes: tuple[str, ...] = ()
    """A sentence for each object beside the model that stays unchanged because nothing in the checkpoint fits it."""
    random: dict[str, Any] | None = field(default=None, repr=False)
    """This rank's random state; None if the checkpoint has none."""

    def restore_random(self, generators: Mapping[str, torch.Generator] | None = None) -> None:
        """Sets the random generators to the saved state, as ``load`` did.

        For loops that draw numbers between ``load`` and their first step, as a loader does when its iterator is made.

        Args:
            generators: The loop's own, by name, as in ``load``.
        """
        if self.random is not None:
            set_random_state(self.random, generators)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest(Belongings):
    """Arguments of a load."""

    folder: Path
    """The run's checkpoints."""
    step: int | None = None
    """Step of the checkpoint; the newest by default."""
    fall_back: bool = False
    """True to load an earlier one if the newest is damaged."""
    partial: bool = False
    """True to load the tensors that fit a changed model."""
    new_run: bool = False
    """True for a new run: settings of optimizers and random generators stay unchanged."""
    draws_alike: bool = False
    """True if all ranks draw the same random numbers; a new rank then continues from the state of rank 0."""


def load(request: LoadRequest, ranks: Ranks) -> Loaded:
    """Loads a checkpoint on all ranks.

    Raises:
        InvalidCheckpointError: No checkpoint exists, it is damaged, or it differs from the model or optimizer.
    """
    checkpoint = _choose(request, ranks)
    opened: _Opened | None = None
    error: Exception | None = None
    try:
        opened = _Opened(checkpoint.path, request)
    except (MosaicError, ValueError, OSError) as failure:
        error = failure
    ranks.raise_if_any_failed(error)
    assert opened is not None
    random = None
    try:
        opened.read()
        random = opened.restore(ranks.rank)
    except Exception as failure:  # of any kind, from the user's objects
        error = failure
    ranks.raise_if_any_failed(error)
    return Loaded(
        step=checkpoint.step,
        extra=from_plain(opened.state["extra"]),
        path=checkpoint.path,
        new=opened.overlap.new,
        gone=opened.overlap.gone,
        changed=opened.overlap.changed,
        notes=tuple(opened.notes),
        random=random,
    )


def _choose(request: LoadRequest, ranks: Ranks) -> Checkpoint:
    """Returns the newest intact checkpoint, the same on all ranks."""
    complete, error = [], None
    if ranks.rank == 0:
        try:
            complete = [(each.serial, each.step, str(each.path)) for each in choose(request.folder, request.step)]
        except MosaicError as failure:
            error = failure
    ranks.raise_if_any_failed(error)
    damaged: list[str] = []
    for serial, step, path in ranks.broadcast(complete):
        own_damage = damage_of(Path(path), part=ranks.rank, parts=ranks.size)
        # Every rank reads the manifest: several may report the same sentence.
        damage = list(dict.fromkeys(sentence for each in ranks.all_gather(own_damage) for sentence in each))
        if not damage:
            whole = Checkpoint(serial=serial, step=step, path=Path(path))
            if damaged and not request.fall_back:
                raise InvalidCheckpointError(
                    f"{'; '.join(damaged)}; the newest intact one before it is {whole.path}: load it with "
                    f"step={whole.step}, or with fall_back=True"
                )
            if damaged and ranks.rank == 0:
                _LOG.warning("%s; going on from %s", "; ".join(damaged), whole.path)
            return whole
        damaged.extend(damage)
    raise InvalidCheckpointError(f"{'; '.join(damaged)}; no earlier one in {request.folder} is intact")


class _Opened:
    """The fitting state of a checkpoint, and the tensors that receive it on this rank."""

    def __init__(self, path: Path, request: LoadRequest) -> None:
        self.path = path
        self.request = request
        self.manifest = Manifest.read(path)
        self.state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        self.stored = {tensor.name: tensor for tensor in self.manifest.tensors}
        self.modules = request.modules()
        self.model = self.modules[MODEL]
        self.notes: list[str] = []
        self.into: list[tuple[str, torch.Tensor]] = []
        """Names of stored tensors, and their destinations."""
        self.overlap = self._fit_model()
        self._fit_companions()
        self.optimizers = self._fit_optimizers()
        self.room = {
            key: tensor
            for saved in self.optimizers.values()
            for key, tensor in targets(saved, self.model, self.stored).items()
        }
        self.into += self.room.items()
        self.plain = self._fit_plain()

    def read(self) -> None:
        """Copies the saved tensors into their destinations, one by one."""
        by_file: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, room in self.into:
            by_file.setdefault(self.stored[name].file, []).append((name, room))
        for file, pairs in by_file.items():
            with open_tensors(self.path / file) as opened, torch.no_grad():
                for name, room in pairs:
                    room.copy_(opened.get_tensor(name))

    def restore(self, rank: int) -> dict[str, Any] | None:
        """Restores optimizers, schedulers, scaler and random generators; returns this rank's random state."""
        for label, optimizer in self.request.optimizers.items():
            if label in self.optimizers:
                restore(self.optimizers[label], optimizer, self.model, self.room.__getitem__)
        for target, state in self.plain:
            target.load_state_dict(from_plain(state))
        entry = self.stored.get(f"{RANDOM}{rank}")
        if entry is None and self.request.draws_alike:
            entry = self.stored.get(f"{RANDOM}0")
        if entry is None or self.request.new_run:
            return None
        with open_tensors(self.path / entry.file) as file:
            random: dict[str, Any] = from_plain(json.loads(bytes(file.get_tensor(entry.name).tolist())))
        set_random_state(random, self.request.generators)
        return random

    def _fit_model(self) -> Overlap:
        saved = self._saved(MODEL)
        partial = self.request.partial
        if partial:
            saved |= {name: saved[first] for name, first in self.manifest.tied.items()}
        overlap = Overlap.of(self.model, {name: (e.dtype, e.shape) for name, e in saved.items()}, aliases=partial)
        overlap.check(self.path, "checkpoint", partial=partial)
        here = self.model.here
        self.into += [(saved[source].name, here[name]) for name, source in overlap.sources.items() if name in here]
        return overlap

    def _fit_companions(self) -> None:
        self._compare("companions", self.request.companions, self.state.get("companions", []))
        for prefix, module in self.modules.items():
            saved = self._saved(prefix)
            if prefix == MODEL or not saved:
                continue
            overlap = Overlap.of(module, {name: (e.dtype, e.shape) for name, e in saved.items()}, aliases=False)
            if not self.request.partial:
                overlap.check(self.path, "checkpoint", partial=False)
            if unchanged := [*overlap.new, *overlap.changed]:
                self.notes.append(f"{prefix.removesuffix('/')}: {some(unchanged)} as they were")
            here = module.here
            self.into += [(saved[name].name, here[name]) for name in overlap.sources if name in here]

    def _fit_optimizers(self) -> dict[str, Any]:
        saved, optimizers = _by_label(self.state, "optimizer"), self.request.optimizers
        partial, new_run = self.request.partial, self.request.new_run
        if not partial or not saved:
            optimizers = self._compare("optimizer", optimizers, saved)
        if not partial:
            for label, optimizer in optimizers.items():
                check_fits(saved[label], optimizer, self.model)
        if not partial and not new_run:
            return {label: saved[label] for label in optimizers}
        tied = self.manifest.tied
        fitting = {name: tied.get(source, source) for name, source in self.overlap.sources.items()}
        fitted = {}
        for label, optimizer in optimizers.items():
            fitted[label] = adapted(saved, label, optimizer, self.model, fitting, with_settings=not new_run)
            trained = [
                name for names in fitted[label]["groups"] for name in names if self.model.tensors[name].requires_grad
            ]
            bare = [name for name in trained if name not in fitted[label]["states"]]
            if partial and bare and any(each["states"] for each in saved.values()):
                self.notes.append(f"{f'optimizer {label}'.strip()}: {some(bare)} without a state")
        return fitted

    def _fit_plain(self) -> list[tuple[Any, Any]]:
        """Returns the schedulers and the scaler with their saved states."""
        targets_and_states = []
        scaler = {} if self.request.scaler is None else {"": self.request.scaler}
        for what, objects in (("scheduler", self.request.schedulers), ("scaler", scaler)):
            saved = _by_label(self.state, what)
            for label, target in self._compare(what, objects, saved).items():
                if self.request.partial and not _alike(saved[label], to_plain(target.state_dict(), what)):
                    self.notes.append(f"{f'{what} {label}'.strip()}: as it was; the saved state is of another form")
                else:
                    targets_and_states.append((target, saved[label]))
        if not self.request.new_run:
            self._compare("generators", self.request.generators, self.state.get("generators", []))
        return targets_and_states

    def _saved(self, prefix: str) -> dict[str, TensorEntry]:
        return {name.removeprefix(prefix): entry for name, entry in self.stored.items() if name.startswith(prefix)}

    def _compare(self, argument: str, objects: Mapping[str, Any] | None, saved: Collection[str]) -> dict[str, Any]:
        """Returns the objects that have a saved state under their name.

        Raises:
            InvalidCheckpointError: The saved names differ, and the load is not partial.
        """
        objects = objects or {}
        if self.request.partial or not objects or set(objects) == set(saved):
            self.notes += [
                f"{f'{argument} {name}'.strip()}: as it was; none was saved" for name in objects if name not in saved
            ]
            return {name: each for name, each in objects.items() if name in saved}
        if not saved:
            raise InvalidCheckpointError(f"{self.path} was saved without {argument}=; load it without, too")
        names = [", ".join(name or "a single one" for name in each) for each in (saved, objects)]
        raise InvalidCheckpointError(
            f"{self.path} was saved with {argument}= of {names[0]}, not {names[1]}; pass the same ones, "
            "or load with partial=True"
        )


def _by_label(state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns the saved optimizers or schedulers by name; a single one has the name ``""``."""
    single = state.get(what)
    return {**({} if single is None else {"": single}), **state.get(f"{what}s", {})}


def _alike(saved: Any, own: Any) -> bool:
    """Returns True if two plain states have the same keys and list lengths."""
    if isinstance(saved, dict) and isinstance(own, dict):
        return saved.keys() == own.keys() and all(_alike(saved[key], own[key]) for key in saved)
    if isinstance(saved, list) and isinstance(own, list):
        return len(saved) == len(own) and all(map(_alike, saved, own))
    return isinstance(saved, list | dict) == isinstance(own, list | dict)
