"""Saving, loading, and weights as one plain file: the methods of a handle, and of a plain model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.checkpoint import folder as run_folder
from mosaic.checkpoint import loading, tensors, weights
from mosaic.checkpoint.ranks import OneRank, Ranks
from mosaic.checkpoint.saving import Saver
from mosaic.checkpoint.state import OneOrSeveral, SavedState


class Checkpointer:
    """Checkpoints of a model; on several ranks, all of them make the same calls.

    A handle derives from it and overrides the name of its plan (``_plan_name``) and the wait for its computation
    (``_settle``).

    Args:
        model: The model.
        ranks: The ranks that save together, each with all or a part of the model; by default this process alone.
    """

    _saver: Saver | None = None
    _ranks: Ranks | None = None
    _lacks_weights = False
    _draws_alike = False

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        self._model = model
        self._ranks = ranks

    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        optimizer: OneOrSeveral[Optimizer] = None,
        scheduler: OneOrSeveral[Any] = None,
        scaler: Any = None,
        companions: Mapping[str, nn.Module] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int = 3,
    ) -> Path:
        """Begins a checkpoint; the loop goes on while it is written.

        Call it between steps. It copies the model, the optimizer and the state of the random generators and returns;
        then a thread writes them into a hidden folder, and renames it once it is on the disk. A run that is killed at
        any instant leaves the last complete checkpoint.

        One checkpoint is written at a time: the next ``save``, ``load``, ``finish_saving`` or ``remove`` waits for it
        and raises its error.

        Args:
            folder: The run's checkpoints; all ranks see it.
            step: The loop's count, which ``load`` returns.
            optimizer: Any of torch's, over the model's parameters; or several, in a sequence or by name.
            scheduler: Of learning rates, or anything with a ``state_dict()`` of plain data, the same on every rank; or
                several.
            scaler: A ``torch.amp.GradScaler``, or anything with such a ``state_dict()``.
            companions: Modules beside the model by name, such as an average of its weights: their parameters and
                buffers are saved as the model's are. On ranks, copies of the model as each rank has it, or whole.
            generators: The loop's own random generators by name; each rank saves its own.
            extra: Plain data: numbers, strings, None, small tensors, and lists, tuples and dicts of these, saved
                by rank 0.
            keep: Number of checkpoints in the folder; older ones are removed once this one is complete.

        Returns:
            The folder of the checkpoint.

        Raises:
            NoRoomError: The disk was full during the previous save, which left nothing; this one has not begun.
                ``make_room`` drops old checkpoints.
            MosaicError: The previous save failed otherwise, the folder cannot be written, or the ranks differ.
            TypeError: A checkpoint cannot hold one of the values; names it.
        """
        state = SavedState(self._model, optimizer, scheduler, scaler, companions, generators)
        if self._saver is None:
            self._saver = Saver(self._the_ranks())
        self._settle()
        with self._made_whole(state):
            return self._saver.save(
                state, Path(folder), step=step, extra=extra or {}, keep=keep, plan=self._plan_name()
            )

    def finish_saving(self) -> None:
        """Waits until the pending checkpoint, if any, is on the disk.

        Raises:
            MosaicError: It could not be written. Earlier checkpoints are unchanged.
        """
        if self._saver is not None:
            self._saver.finish()

    def load(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        optimizer: OneOrSeveral[Optimizer] = None,
        scheduler: OneOrSeveral[Any] = None,
        scaler: Any = None,
        companions: Mapping[str, nn.Module] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        fall_back: bool = False,
        missing_ok: bool = False,
        partial: bool = False,
        new_run: bool = False,
    ) -> loading.Loaded | None:
        """Loads a checkpoint, saved under any plan and number of ranks, into the model as it is colocated now.

        It checks every file first. The random generators of a rank continue from the state of the same rank; a new rank
        keeps its own state, and in a pipeline, whose ranks draw alike, continues from rank 0.

        Args:
            folder: The run's checkpoints.
            step: Step of the checkpoint; the newest by default.
            optimizer: Receives its state; new or not, over the same parameters as the saved one. Several receive theirs
                by name or by order.
            scheduler: Receives its state, or several do.
            scaler: Receives its state.
            companions: Receive the state saved under their names.
            generators: Receive the state saved under their names.
            fall_back: Load the newest intact checkpoint if the newest is damaged, and log a warning. By default that is
                an error, which names the intact one.
            missing_ok: Return None if no checkpoint exists, as at the first start of a loop that may be restarted.
            partial: Load what fits a changed model: tensors of the same name, shape and dtype, and optimizers of the
                same class over the same parameters. The others stay as they are, and ``notes`` names them.
            new_run: Begin another run: optimizers keep their current settings, such as learning rates, and random
                generators keep their state. Leave out the scheduler, too, if the run has a new one.

        Returns:
            The step and ``extra``; with ``partial``, also the new, gone and changed tensors.

        Raises:
            InvalidCheckpointError: No checkpoint exists, it is damaged, or it differs from the model or optimizer.
            ValueError: ``partial`` with a scheduler or scaler.
        """
        self._settle()
        self.finish_saving()
        ranks = self._the_ranks()
        if missing_ok and ranks.broadcast(not run_folder.checkpoints_in(Path(folder))):
            return None
        state = SavedState(self._model, optimizer, scheduler, scaler, companions, generators)
        with self._made_whole(state):
            loaded = loading.load(
                state,
                Path(folder),
                ranks,
                step=step,
                fall_back=fall_back,
                partial=partial,
                new_run=new_run,
                draws_alike=self._draws_alike,
            )
        self._lacks_weights = False
        return loaded

    def export(self, path: str | Path) -> None:
        """Writes the plain model's ``state_dict`` as one safetensors file for ``load_state_dict``.

        Rank 0 writes it and holds one tensor of other ranks at a time. Tied weights appear under all of their names.

        Raises:
            MosaicError: The file cannot be written, and does not exist.
        """
        self._settle()
        with self._made_whole():
            weights.export(self._model, Path(path), self._the_ranks())

    def load_weights(self, path: str | Path, *, partial: bool = False) -> tensors.Overlap:
        """Copies weights from a plain safetensors file, or a folder of such files, into the model as it is colocated.

        Args:
            path: The file or folder.
            partial: Load the tensors whose name and shape fit a different model.

        Returns:
            The loaded tensors, and with ``partial`` the new, gone and changed ones.

        Raises:
            InvalidCheckpointError: The file is of another model; lists the differences.
            InvalidFileError: It is not such a file, or is truncated.
        """
        self._settle()
        with self._made_whole():
            overlap = weights.load_weights(self._model, Path(path), self._the_ranks(), partial=partial)
        self._lacks_weights = False
        return overlap

    def digest(self) -> str:
        """Returns the SHA-256 over all parameters and buffers, the same under any plan and number of ranks."""
        self._settle()
        with self._made_whole():
            return tensors.digest_of(self._model, self._the_ranks())

    def make_room(self, folder: str | Path) -> tuple[int, ...]:
        """Removes all checkpoints except the newest intact one, for a loop whose disk is full.

        It waits for the pending checkpoint and raises its error.

        Returns:
            The steps of the removed checkpoints.
        """
        self.finish_saving()
        ranks = self._the_ranks()
        gone = [checkpoint.step for checkpoint in run_folder.make_room(Path(folder))] if ranks.rank == 0 else []
        return tuple(ranks.broadcast(gone))

    def _the_ranks(self) -> Ranks:
        if self._ranks is None:
            self._ranks = self._make_ranks()
        return self._ranks

    def _make_ranks(self) -> Ranks:
        return OneRank()

    def _made_whole(self, state: SavedState | None = None) -> AbstractContextManager[None]:
        """Returns a context in which the tensors of the model and its optimizers are unsharded."""
        return nullcontext()

    def _plan_name(self) -> str:
        return "plain"

    def _settle(self) -> None:
        """Does nothing: a plain model computes in the loop's own order."""
