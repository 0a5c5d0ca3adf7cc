"""Loading a checkpoint into a model that is colocated under any plan: each rank reads what it has room for."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mosaic.checkpoint.folder import (
    MODEL,
    RANDOM,
    STATE,
    Checkpoint,
    Manifest,
    TensorEntry,
    choose,
    damage_of,
)
from mosaic.checkpoint.ranks import Ranks
from mosaic.checkpoint.state import (
    OptimizerState,
    SavedState,
    fitting_state,
    from_plain,
    restore_optimizer,
    set_random_state,
    some,
    to_plain,
)
from mosaic.checkpoint.tensors import ModelTensors, Overlap, dtype_of, open_tensors
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


def load(
    state: SavedState,
    folder: Path,
    ranks: Ranks,
    *,
    step: int | None = None,
    fall_back: bool = False,
    partial: bool = False,
    new_run: bool = False,
    draws_alike: bool = False,
) -> Loaded:
    """Loads a checkpoint on all ranks; see ``KeepsCheckpoints.load``.

    With ``draws_alike`` all ranks draw the same random numbers: a new rank continues from the state of rank 0.
    """
    checkpoint = _choose(folder, step, ranks, fall_back=fall_back)
    reader: _Reader | None = None
    random = None
    error: Exception | None = None
    with ExitStack() as files:
        try:
            reader = _Reader(checkpoint.path, state, files, partial=partial, new_run=new_run)
            reader.fit()
        except (MosaicError, ValueError, OSError) as failure:
            error = failure
        ranks.raise_if_any_failed(error)
        assert reader is not None
        try:
            random = reader.restore((ranks.rank, 0) if draws_alike else (ranks.rank,))
        except Exception as failure:  # of any kind, from the user's objects
            error = failure
        ranks.raise_if_any_failed(error)
    return Loaded(
        step=checkpoint.step,
        extra=from_plain(reader.saved["extra"]),
        path=checkpoint.path,
        new=reader.overlap.new,
        gone=reader.overlap.gone,
        changed=reader.overlap.changed,
        notes=tuple(reader.notes),
        random=random,
    )


def _choose(folder: Path, step: int | None, ranks: Ranks, *, fall_back: bool) -> Checkpoint:
    """Returns the newest intact checkpoint, the same on all ranks, each of which verifies some files."""
    checkpoints: tuple[Checkpoint, ...] = ()
    error = None
    if ranks.rank == 0:
        try:
            checkpoints = choose(folder, step)
        except MosaicError as failure:
            error = failure
    ranks.raise_if_any_failed(error)
    damaged: list[str] = []
    for checkpoint in ranks.broadcast(checkpoints):
        reports = ranks.all_gather(damage_of(checkpoint.path, part=ranks.rank, parts=ranks.size))
        # Every rank reads the manifest: several may report the same sentence.
        damage = list(dict.fromkeys(sentence for report in reports for sentence in report))
        if damage:
            damaged += damage
            continue
        if damaged and not fall_back:
            raise InvalidCheckpointError(
                f"{'; '.join(damaged)}; the newest intact one before it is {checkpoint.path}: load it with "
                f"step={checkpoint.step}, or with fall_back=True"
            )
        if damaged and ranks.rank == 0:
            _LOG.warning("%s; going on from %s", "; ".join(damaged), checkpoint.path)
        return checkpoint
    raise InvalidCheckpointError(f"{'; '.join(damaged)}; no earlier one in {folder} is intact")


class _Reader:
    """The state in a checkpoint that fits the objects of a run.

    ``fit`` compares and changes nothing; ``restore`` then changes the objects.
    """

    def __init__(self, path: Path, state: SavedState, files: ExitStack, *, partial: bool, new_run: bool) -> None:
        self._path = path
        self._state = state
        self._files = files
        self._partial = partial
        self._new_run = new_run
        manifest = Manifest.read(path)
        self._tied = manifest.tied
        self._stored = {tensor.name: tensor for tensor in manifest.tensors}
        self._open: dict[str, Any] = {}
        self.saved: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        self.notes: list[str] = []
        self._restores: list[Callable[[], object]] = []

    def fit(self) -> None:
        """Finds the fitting state.

        Raises:
            InvalidCheckpointError: The checkpoint differs from the objects, and the load is not partial.
        """
        modules = self._state.modules()
        self._model = modules.pop(MODEL)
        saved = self._saved_tensors(MODEL)
        if self._partial:
            saved |= {name: saved[first] for name, first in self._tied.items()}
        self.overlap = self._fit_module(self._model, saved, partial=self._partial)
        self._match("companions", self._state.companions, self.saved.get("companions", []))
        for prefix, module in modules.items():
            if saved := self._saved_tensors(prefix):
                overlap = self._fit_module(module, saved, partial=None if self._partial else False)
                if unchanged := [*overlap.new, *overlap.changed]:
                    self.notes.append(f"{prefix.removesuffix('/')}: {some(unchanged)} as they were")
        self._fit_optimizers()
        self._fit_plain("scheduler", self._state.schedulers)
        self._fit_plain("scaler", {} if self._state.scaler is None else {"": self._state.scaler})
        if not self._new_run:
            self._match("generators", self._state.generators, self.saved.get("generators", []))

    def restore(self, random_ranks: tuple[int, ...]) -> dict[str, Any] | None:
        """Changes the objects; returns this rank's random state, of the first of ``random_ranks`` that has one."""
        for restore in self._restores:
            restore()
        names = [name for rank in random_ranks if (name := f"{RANDOM}{rank}") in self._stored]
        if not names or self._new_run:
            return None
        random: dict[str, Any] = from_plain(json.loads(bytes(self._tensor(names[0]).tolist())))
        set_random_state(random, self._state.generators)
        return random

    def _tensor(self, name: str) -> torch.Tensor:
        """Returns a stored tensor, which may be a view of its file."""
        file = self._stored[name].file
        if file not in self._open:
            self._open[file] = self._files.enter_context(open_tensors(self._path / file))
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor

    def _copy_into(self, tensor: torch.Tensor, name: str) -> None:
        tensor.copy_(self._tensor(name))

    def _copy_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a copy of a stored tensor of an optimizer, beside its parameter if it has the same shape."""
        entry = self._stored[name]
        device = parameter.device if entry.shape == tuple(parameter.shape) else torch.device("cpu")
        return torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device=device).copy_(self._tensor(name))

    def _saved_tensors(self, prefix: str) -> dict[str, TensorEntry]:
        return {name.removeprefix(prefix): entry for name, entry in self._stored.items() if name.startswith(prefix)}

    def _fit_module(self, module: ModelTensors, saved: Mapping[str, TensorEntry], *, partial: bool | None) -> Overlap:
        """Compares a module; ``partial`` is None if nothing needs to fit."""
        shapes = {name: (entry.dtype, entry.shape) for name, entry in saved.items()}
        overlap = Overlap.of(module, shapes, aliases=bool(partial))
        if partial is not None:
            overlap.check(self._path, "checkpoint", partial=partial)
        here = module.here
        pairs = [(saved[source].name, here[name]) for name, source in overlap.sources.items() if name in here]
        self._restores += [functools.partial(self._copy_into, tensor, name) for name, tensor in pairs]
        return overlap

    def _fit_optimizers(self) -> None:
        saved = {label: OptimizerState(**each) for label, each in _by_label(self.saved, "optimizer").items()}
        optimizers = self._state.optimizers
        if not self._partial or not saved:
            optimizers = self._match("optimizer", optimizers, saved)
        sources = {name: self._tied.get(source, source) for name, source in self.overlap.sources.items()}
        for label, optimizer in optimizers.items():
            own, _ = OptimizerState.of(optimizer, self._model)
            candidates = saved
            if not self._partial:  # no other one: two may have states of one parameter
                saved[label].check_fits(own, self._model)
                candidates = {label: saved[label]}
            fitting = fitting_state(candidates, label, own, sources, with_settings=not self._new_run)
            trained = [name for name in own.group_of if self._model.tensors[name].requires_grad]
            bare = [name for name in trained if name not in fitting.states]
            if self._partial and bare and any(each.states for each in saved.values()):
                self.notes.append(f"{f'optimizer {label}'.strip()}: {some(bare)} without a state")
            self._restores.append(functools.partial(restore_optimizer, optimizer, fitting, self._model, self._copy_of))

    def _fit_plain(self, what: str, targets: Mapping[str, Any]) -> None:
        """Fits the schedulers or the scaler."""
        saved = _by_label(self.saved, what)
        for label, target in self._match(what, targets, saved).items():
            if self._partial and not _has_same_form(saved[label], to_plain(target.state_dict(), what)):
                self.notes.append(f"{f'{what} {label}'.strip()}: as it was; the saved state is of another form")
            else:
                state = from_plain(saved[label])
                self._restores.append(functools.partial(target.load_state_dict, state))

    def _match(self, argument: str, objects: Mapping[str, Any] | None, saved: Collection[str]) -> dict[str, Any]:
        """Returns the objects that have a saved state under their name.

        Raises:
            InvalidCheckpointError: The saved names differ, and the load is not partial.
        """
        objects = objects or {}
        if self._partial or not objects or set(objects) == set(saved):
            self.notes += [
                f"{f'{argument} {name}'.strip()}: as it was; none was saved" for name in objects if name not in saved
            ]
            return {name: each for name, each in objects.items() if name in saved}
        if not saved:
            raise InvalidCheckpointError(f"{self._path} was saved without {argument}=; load it without, too")
        names = [", ".join(name or "a single one" for name in each) for each in (saved, objects)]
        raise InvalidCheckpointError(
            f"{self._path} was saved with {argument}= of {names[0]}, not {names[1]}; pass the same ones, or load with "
            "partial=True"
        )


def _by_label(state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns the saved optimizers or schedulers by name; a single one has the name ``""``."""
    single = state.get(what)
    return {**({} if single is None else {"": single}), **state.get(f"{what}s", {})}


def _has_same_form(saved: Any, own: Any) -> bool:
    """Returns True if two plain states have the same keys and list lengths."""
    if isinstance(saved, dict) and isinstance(own, dict):
        return saved.keys() == own.keys() and all(_has_same_form(saved[key], own[key]) for key in saved)
    if isinstance(saved, list) and isinstance(own, list):
        return len(saved) == len(own) and all(map(_has_same_form, saved, own))
    return isinstance(saved, list | dict) == isinstance(own, list | dict)
