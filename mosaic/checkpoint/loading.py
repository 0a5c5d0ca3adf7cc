"""Loading a checkpoint into a model that is colocated under any plan: each rank reads what it has room for."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.checkpoint.folder import Checkpoint, choose, damage_of
from mosaic.checkpoint.manifest import MODEL, RANDOM, STATE, Manifest, TensorEntry
from mosaic.checkpoint.model_tensors import ModelTensors, raise_other_model
from mosaic.checkpoint.optimizer_state import check_fits, restore, targets
from mosaic.checkpoint.plain_data import from_plain
from mosaic.checkpoint.random_state import set_random_state
from mosaic.checkpoint.ranks import Ranks
from mosaic.checkpoint.tensor_file import TensorSpec, open_tensors
from mosaic.errors import InvalidCheckpointError, MosaicError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint brought beside the model's state."""

    step: int
    """The step that it was saved at."""
    extra: dict[str, Any]
    """What rank 0 had given as ``extra``."""
    path: Path
    """Its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What is to be loaded, and into what."""

    model: nn.Module
    """The model, of which this rank may have a part."""
    folder: Path
    """The run's checkpoints."""
    step: int | None = None
    """Which one; the newest by default."""
    optimizer: Optimizer | None = None
    """Gets its state."""
    scheduler: Any = None
    """Gets its state."""
    fall_back: bool = False
    """Whether to take an earlier one where the newest is damaged."""


def load(request: LoadRequest, ranks: Ranks) -> Loaded:
    """Loads a checkpoint on all ranks.

    Raises:
        InvalidCheckpointError: There is none, it is damaged, or it is of another model or optimizer; says in what.
    """
    chosen = _choose(request, ranks)
    opened: _Opened | None = None
    error: Exception | None = None
    try:
        opened = _Opened.open(chosen, request)
    except (MosaicError, ValueError, OSError) as failure:
        error = failure
    ranks.all_or_none(error)
    assert opened is not None
    try:
        opened.read()
        opened.restore(request, ranks.rank)
    except Exception as failure:  # of any kind, from the user's objects
        error = failure
    ranks.all_or_none(error)
    return Loaded(step=chosen.step, extra=from_plain(opened.state["extra"]), path=chosen.path)


def _choose(request: LoadRequest, ranks: Ranks) -> Checkpoint:
    """Returns the checkpoint to load, the same on all ranks, once its files are known to be whole."""
    found, error = [], None
    if ranks.rank == 0:
        try:
            found = [(each.serial, each.step, str(each.path)) for each in choose(request.folder, request.step)]
        except MosaicError as failure:
            error = failure
    ranks.all_or_none(error)
    damaged: list[str] = []
    for serial, step, path in ranks.first_says(found):
        mine = damage_of(Path(path), part=ranks.rank, parts=ranks.size)
        # Every rank reads the manifest, so several may say the same.
        damage = list(dict.fromkeys(sentence for each in ranks.tell(mine) for sentence in each))
        if not damage:
            whole = Checkpoint(serial=serial, step=step, path=Path(path))
            if damaged and not request.fall_back:
                raise InvalidCheckpointError(
                    f"{'; '.join(damaged)}; the newest before it that is whole is {whole.path}: load it with "
                    f"step={whole.step}, or with fall_back=True"
                )
            if damaged and ranks.rank == 0:
                _LOG.warning("%s; going on from %s", "; ".join(damaged), whole.path)
            return whole
        damaged.extend(damage)
    raise InvalidCheckpointError(f"{'; '.join(damaged)}; there is no earlier one that is whole in {request.folder}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A checkpoint that fits, and the room for what this rank takes from it."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    model: ModelTensors
    into: dict[str, torch.Tensor]

    @staticmethod
    def open(chosen: Checkpoint, request: LoadRequest) -> _Opened:
        manifest = Manifest.read(chosen.path)
        state = json.loads((chosen.path / STATE).read_text(encoding="utf-8"))
        stored = {tensor.name: tensor for tensor in manifest.tensors}
        model = ModelTensors.of(request.model)
        _check_model(chosen.path, stored, model)
        into = {f"{MODEL}{name}": tensor for name, tensor in model.here.items()}
        for what in ("optimizer", "scheduler"):
            if getattr(request, what) is not None and state[what] is None:
                raise InvalidCheckpointError(f"{chosen.path} was saved without {what}=; load it without, too")
        if request.optimizer is not None:
            check_fits(state["optimizer"], request.optimizer, model)
            into.update(targets(state["optimizer"], model, stored))
        return _Opened(path=chosen.path, manifest=manifest, state=state, model=model, into=into)

    def read(self) -> None:
        """Copies what was saved into the room that is there, one tensor after the other."""
        by_file: dict[str, list[str]] = {}
        for tensor in self.manifest.tensors:
            if tensor.name in self.into:
                by_file.setdefault(tensor.file, []).append(tensor.name)
        for file, names in by_file.items():
            with open_tensors(self.path / file) as opened, torch.no_grad():
                for name in names:
                    self.into[name].copy_(opened.get_tensor(name))

    def restore(self, request: LoadRequest, rank: int) -> None:
        """Gives the rest its state."""
        if request.optimizer is not None:
            restore(self.state["optimizer"], request.optimizer, self.model, self.into.__getitem__)
        if request.scheduler is not None:
            request.scheduler.load_state_dict(from_plain(self.state["scheduler"]))
        name = f"{RANDOM}{rank}"
        found = next((tensor for tensor in self.manifest.tensors if tensor.name == name), None)
        if found is not None:
            with open_tensors(self.path / found.file) as file:
                set_random_state(from_plain(json.loads(bytes(file.get_tensor(name).tolist()))))


def _check_model(path: Path, stored: Mapping[str, TensorEntry], model: ModelTensors) -> None:
    """Raises InvalidCheckpointError if a checkpoint is of another model; names what differs."""
    saved = {name.removeprefix(MODEL): entry for name, entry in stored.items() if name.startswith(MODEL)}
    differing = []
    for name in sorted(saved.keys() | model.tensors.keys()):
        if name not in model.tensors:
            differing.append(f"{name} is only in the checkpoint")
        elif name not in saved:
            differing.append(f"{name} is only in the model")
        else:
            own = TensorSpec.of(name, model.tensors[name])
            if (own.dtype, own.shape) != (saved[name].dtype, saved[name].shape):
                differing.append(
                    f"{name} is {saved[name].dtype} {list(saved[name].shape)} in the checkpoint and {own.dtype} "
                    f"{list(own.shape)} in the model"
                )
    raise_other_model(path, differing)
