"""A handle's methods for keeping a run: saving, loading, and weights as one plain file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosaic.checkpoint.ranks import OneRank, Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from mosaic.checkpoint.belongings import Belongings, OneOrSeveral
    from mosaic.checkpoint.loading import Loaded
    from mosaic.checkpoint.model_tensors import Overlap
    from mosaic.checkpoint.saving import Saver


class KeepsCheckpoints(ABC):
    """Checkpoints of a handle's model; on several ranks, all of them make the same calls.

    A handle says what its model is (``_model``), what plan runs (``_plan_name()``), and how to wait for what is being
    computed (``_settle()``).
    """

    _model: nn.Module
    _saver: Saver | None = None
    _ranks: Ranks | None = None
    _lacks_weights = False
    _draws_alike = False

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

        Called between steps. The model, the optimizer and the state of the random generators are copied before it
        returns; then a thread writes them beside the place where they will be, and renames the whole once it is on the
        disk. A run that is killed at any instant leaves the last complete one.

        One is written at a time: the next ``save``, ``load``, ``finish_saving`` or ``remove`` waits for it, and raises
        its error if it had one.

        Args:
            folder: The run's checkpoints; all ranks see it.
            step: The loop's count; comes back from ``load``.
            optimizer: Any of torch's, over the model's parameters; or several, in a sequence or by name.
            scheduler: Of learning rates, or anything with a ``state_dict()`` of plain data, the same on every rank; or
                several.
            scaler: A ``torch.amp.GradScaler``, or anything with such a ``state_dict()``.
            companions: Modules beside the model by name, such as an average of its weights: their parameters and
                buffers are saved as the model's are. On ranks, copies of the model as each rank has it, or whole.
            generators: The loop's own random generators by name; each rank's are kept.
            extra: Plain data: numbers, strings, None, small tensors, and lists, tuples and dicts of these. Rank 0's is
                kept.
            keep: How many checkpoints stay in the folder; older ones are removed once this one is complete.

        Returns:
            The folder that it will be in.

        Raises:
            NoRoomError: The disk was full when the one before was written, and nothing of it is left; this one was not
                begun. ``make_room`` drops old ones.
            MosaicError: The one before could not be written otherwise, the folder cannot be, or the ranks differ.
            TypeError: There is something that no checkpoint holds; names it.
        """
        from mosaic.checkpoint.saving import SaveRequest

        self._settle()
        request = SaveRequest(
            model=self._model,
            folder=Path(folder),
            step=step,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            companions=companions,
            generators=generators,
            extra=extra or {},
            keep=keep,
            plan=self._plan_name(),
        )
        with self._made_whole(request):
            return self._the_saver().save(request)

    def prepare_saving(
        self, *, optimizer: OneOrSeveral[Optimizer] = None, companions: Mapping[str, nn.Module] | None = None
    ) -> None:
        """Makes room in memory for copies, so that the first ``save`` holds the loop up no longer than the later ones.

        Called before the first step; fresh memory takes several times as long as a copy.
        """
        from mosaic.checkpoint.belongings import Belongings

        self._the_saver().prepare(Belongings(model=self._model, optimizer=optimizer, companions=companions))

    def finish_saving(self) -> None:
        """Waits until the checkpoint that was begun is on the disk; does nothing if there is none.

        Raises:
            MosaicError: It could not be written; says why. Those before it are as they were.
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
    ) -> Loaded | None:
        """Loads a checkpoint into the model as it is colocated now, whatever plan and ranks it was saved under.

        Every file is read and checked first. The random generators of a rank go on where those of the same rank were;
        a rank that was not there keeps its own, and in a pipeline, whose ranks draw alike, goes on as rank 0.

        Args:
            folder: The run's checkpoints.
            step: Which one; the newest by default.
            optimizer: Gets its state; new or not, over the same parameters as the one that was saved. Several get
                theirs under the names, or in the order, that they were saved in.
            scheduler: Gets its state, or several do.
            scaler: Gets its state.
            companions: Get what was saved under their names.
            generators: Go on where those of their names were.
            fall_back: Where the newest is damaged, load the newest before it that is whole, and say so in the log. By
                default that is an error, which names it.
            missing_ok: Return None where there is no checkpoint yet, as at the first start of a loop that may be
                restarted.
            partial: Take what fits where the model has changed: tensors of the same name, shape and dtype, the state of
                each such parameter from any optimizer of the same class, settings of groups whose parameters were in
                one group, and of the rest what has the same form.
            new_run: Begin another run from it: optimizers keep the settings that they have, such as learning rates, and
                random generators go on as they are. Leave out the scheduler, too, if the run has a new one.

        Returns:
            The step and what was given as ``extra``; with ``partial``, what is new, gone or changed as well.

        Raises:
            InvalidCheckpointError: There is none, it is damaged, or it is of another model or optimizer; says in what.
        """
        from mosaic.checkpoint.folder import checkpoints_in
        from mosaic.checkpoint.loading import LoadRequest, load

        self._settle()
        self.finish_saving()
        ranks = self._the_ranks()
        if missing_ok and ranks.broadcast(not checkpoints_in(Path(folder))):
            return None
        request = LoadRequest(
            model=self._model,
            folder=Path(folder),
            step=step,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            companions=companions,
            generators=generators,
            fall_back=fall_back,
            partial=partial,
            new_run=new_run,
            draws_alike=self._draws_alike,
        )
        with self._made_whole(request):
            found = load(request, ranks)
        self._lacks_weights = False
        return found

    def export(self, path: str | Path) -> None:
        """Writes the plain model's ``state_dict`` as one safetensors file, which ``load_state_dict`` takes whole.

        Rank 0 writes it and holds one tensor of other ranks at a time. Tied weights are there under all of their names.

        Raises:
            MosaicError: It cannot be written; nothing is left of it.
        """
        from mosaic.checkpoint.plain_weights import export

        self._settle()
        with self._made_whole():
            export(self._model, Path(path), self._the_ranks())

    def load_weights(self, path: str | Path, *, partial: bool = False) -> Overlap:
        """Copies weights from a plain safetensors file, or a folder of such files, into the model as it is colocated.

        Args:
            path: The file or folder.
            partial: Take the tensors that fit by name and shape where the model is another one.

        Returns:
            What was loaded, and with ``partial`` what is new, gone or changed.

        Raises:
            InvalidCheckpointError: It is of another model; says in what it differs.
            InvalidFileError: It is no such file, or cut short.
        """
        from mosaic.checkpoint.plain_weights import load_weights

        self._settle()
        with self._made_whole():
            found = load_weights(self._model, Path(path), self._the_ranks(), partial=partial)
        self._lacks_weights = False
        return found

    def digest(self) -> str:
        """Returns the SHA-256 over all parameters and buffers, the same under any plan and number of ranks."""
        from mosaic.checkpoint.model_tensors import digest_of

        self._settle()
        with self._made_whole():
            return digest_of(self._model, self._the_ranks())

    def make_room(self, folder: str | Path) -> tuple[int, ...]:
        """Removes all checkpoints but the newest one that is whole, for a loop whose save met a full disk.

        Waits for the one that is being written, if there is one, and raises its error.

        Returns:
            The steps of those that were removed.
        """
        from mosaic.checkpoint.room import make_room

        self.finish_saving()
        ranks = self._the_ranks()
        gone = [found.step for found in make_room(Path(folder))] if ranks.rank == 0 else []
        return tuple(ranks.broadcast(gone))

    def _the_ranks(self) -> Ranks:
        if self._ranks is None:
            self._ranks = self._make_ranks()
        return self._ranks

    def _the_saver(self) -> Saver:
        from mosaic.checkpoint.saving import Saver

        if self._saver is None:
            self._saver = Saver(self._the_ranks())
        return self._saver

    def _make_ranks(self) -> Ranks:
        return OneRank()

    def _made_whole(self, belongings: Belongings | None = None) -> AbstractContextManager[None]:
        """Returns a block in which the model, and what is saved or loaded with it, have no tensors in parts."""
        return nullcontext()

    @abstractmethod
    def _plan_name(self) -> str:
        """Names the plan that runs."""

    @abstractmethod
    def _settle(self) -> None:
        """Waits for what is being computed."""


class KeptModel(KeepsCheckpoints):
    """Checkpoints of a plain model, for loops in which nothing is colocated.

    Args:
        model: The model.
        ranks: Who saves together, each with the whole model or a part of it; this process alone by default.
    """

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        self._model = model
        self._ranks = ranks

    def _plan_name(self) -> str:
        return "plain"

    def _settle(self) -> None:
        """Does nothing: what a plain model computes is in the loop's own order."""
