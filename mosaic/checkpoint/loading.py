"""Loading a checkpoint into a model that is colocated under any plan: each rank reads what it has room for."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from mosaic.checkpoint.folder import MODEL, RANDOM, STATE, Checkpoint, Manifest, TensorEntry, choose, damage_of
from mosaic.checkpoint.ranks import Ranks, run_on_all
from mosaic.checkpoint.state import OptimizerState, SavedState, from_plain, set_random_state, some
from mosaic.checkpoint.tensors import ModelTensors, Overlap, dtype_of, open_tensors
from mosaic.errors import InvalidCheckpointError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Overlap):
    """Content of a checkpoint beside the model's state, and the differences after a partial load."""

    step: int
    """The step that it was saved at."""
    extra: dict[str, Any]
    """``extra`` of rank 0."""
    path: Path
    """Its folder."""
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
    """Loads a checkpoint on all ranks; see ``Checkpointer.load``.

    With ``draws_alike`` all ranks draw the same random numbers: a new rank continues from the state of rank 0.
    """
    if partial and (state.schedulers or state.scaler is not None):
        raise ValueError(
            "partial=True loads a changed model, to which the state of a scheduler or scaler may not fit; leave "
            "scheduler= and scaler= out"
        )
    checkpoint = _choose(folder, step, ranks, fall_back=fall_back)
    with ExitStack() as files:
        reader = run_on_all(ranks, lambda: _Reader(checkpoint.path, state, files, partial=partial, new_run=new_run))
        random = run_on_all(ranks, lambda: reader.restore((ranks.rank, 0) if draws_alike else (ranks.rank,)))
    return Loaded(
        step=checkpoint.step,
        extra=from_plain(reader.saved["extra"]),
        path=checkpoint.path,
        **{each.name: getattr(reader.overlap, each.name) for each in fields(reader.overlap)},
        notes=tuple(reader.notes),
        random=random,
    )


def _choose(folder: Path, step: int | None, ranks: Ranks, *, fall_back: bool) -> Checkpoint:
    """Returns the newest intact checkpoint, the same on all ranks, each of which verifies some files."""
    damaged: list[str] = []
    for checkpoint in ranks.broadcast(run_on_all(ranks, lambda: () if ranks.rank else choose(folder, step))):
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

    The constructor compares and changes nothing; ``restore`` then changes the objects.

    Raises:
        InvalidCheckpointError: The checkpoint differs from the objects, and the load is not partial.
    """

    def __init__(self, path: Path, state: SavedState, files: ExitStack, *, partial: bool, new_run: bool) -> None:
        self._path, self._state, self._files = path, state, files
        self._partial, self._new_run = partial, new_run
        manifest = Manifest.read(path)
        self._tied = manifest.tied
        self._stored = {tensor.name: tensor for tensor in manifest.tensors}
        self._open: dict[str, Any] = {}
        self._restores: list[Callable[[], object]] = []
        self.saved: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        self.notes: list[str] = []
        self._fit_modules()
        self._fit_optimizers()
        self._fit_plain("scheduler", state.schedulers)
        self._fit_plain("scaler", {} if state.scaler is None else {"": state.scaler})
        if not new_run:
            self._match("generators", state.generators, self.saved.get("generators", []))

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

    def _fit_modules(self) -> None:
        modules = self._state.modules()
        self._model = modules.pop(MODEL)
        saved = self._saved_tensors(MODEL)
        if self._partial:
            saved |= {name: saved[first] for name, first in self._tied.items()}
        self.overlap = self._fit_module(self._model, saved, aliases=self._partial)
        self.overlap.check(self._path, "checkpoint", partial=self._partial)
        self._match("companions", self._state.companions, self.saved.get("companions", []))
        for prefix, module in modules.items():
            if saved := self._saved_tensors(prefix):
                overlap = self._fit_module(module, saved, aliases=False)
                if not self._partial:
                    overlap.check(self._path, "checkpoint", partial=False)
                elif unchanged := [*overlap.new, *overlap.changed]:
                    self.notes.append(f"{prefix.removesuffix('/')}: {some(unchanged)} as they were")

    def _saved_tensors(self, prefix: str) -> dict[str, TensorEntry]:
        return {name.removeprefix(prefix): entry for name, entry in self._stored.items() if name.startswith(prefix)}

    def _fit_module(self, module: ModelTensors, saved: Mapping[str, TensorEntry], *, aliases: bool) -> Overlap:
        shapes = {name: (entry.dtype, entry.shape) for name, entry in saved.items()}
        overlap = Overlap.of(module, shapes, aliases=aliases)
        here = module.here
        pairs = [(saved[source].name, here[name]) for name, source in overlap.sources.items() if name in here]
        self._restores += [functools.partial(self._copy_into, tensor, name) for name, tensor in pairs]
        return overlap

    def _fit_optimizers(self) -> None:
        saved = {label: OptimizerState(**each) for label, each in _by_label(self.saved, "optimizer").items()}
        for label, optimizer in self._match("optimizer", self._state.optimizers, saved).items():
            state, (own, _) = saved[label], OptimizerState.of(optimizer, self._model)
            try:
                state.check_fits(own, self._model, changed=self.overlap.changed)
            except InvalidCheckpointError as error:
                if not self._partial:
                    raise
                self.notes.append(f"{f'optimizer {label}'.strip()}: as it was; {error}")
                continue
            arguments = optimizer, own, self._model, self._copy_of
            self._restores.append(functools.partial(state.restore, *arguments, with_settings=not self._new_run))

    def _fit_plain(self, kind: str, targets: Mapping[str, Any]) -> None:
        """Fits the schedulers or the scaler."""
        saved = _by_label(self.saved, kind)
        for label, target in self._match(kind, targets, saved).items():
            self._restores.append(functools.partial(target.load_state_dict, from_plain(saved[label])))

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


def _by_label(state: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the saved optimizers or schedulers by name; a single one has the name ``""``."""
    single = state.get(kind)
    return {**({} if single is None else {"": single}), **state.get(f"{kind}s", {})}
