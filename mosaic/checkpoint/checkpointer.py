"""Saving, loading, and weights as one plain file: the methods of a handle, and of a plain model.

The step waits only for a copy in memory, which a thread writes while training goes on. Loading compares everything
with the run's objects before it changes any of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial as bind
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mosaic.checkpoint import folder as run_folder
from mosaic.checkpoint.folder import MODEL, RANDOM, STATE, Checkpoint, Manifest, SavingPlace
from mosaic.checkpoint.state import (
    OneOrSeveral,
    OptimizerState,
    Part,
    SavedState,
    T,
    by_label,
    from_plain,
    set_random_state,
    state_file,
)
from mosaic.checkpoint.tensors import (
    SUFFIX,
    ModelTensors,
    Overlap,
    StoredTensors,
    bytes_of,
    describe,
    extract_weights,
    open_weights,
    write_tensors,
)
from mosaic.errors import InvalidCheckpointError, MosaicError, NoRoomError

_LOG = logging.getLogger(__name__)
_FILE = "rank-{:05d}" + SUFFIX


class Ranks:
    """One process that saves and loads alone; ``World`` overrides this for ranks, which all make the same calls."""

    rank = 0
    size = 1

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        """Returns the value of rank 0."""
        return value

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        """Raises on all ranks if one failed: its own error there, one that names it elsewhere."""
        if error is not None:
            raise error

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Returns the result of this rank's work; if any rank fails, all raise as in ``raise_if_any_failed``."""
        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # of any kind, also from the user's objects: all ranks have to raise
            error = failure
        self.raise_if_any_failed(error)
        return cast(T, result)

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Returns the result of rank 0's work on all ranks; if it fails, all raise."""
        return cast(T, self.broadcast(self.run_on_all(lambda: work() if self.rank == 0 else None)))

    def background_group(self) -> dist.ProcessGroup | None:
        """Returns a CPU group reserved for checkpoints, the same at each call; None for one process."""
        return None


def gather_objects(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Returns the value of each rank of a group, or of the only process."""
    values: list[T] = [value] * (1 if group is None else dist.get_world_size(group))
    if group is not None:
        dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Content of a checkpoint beside the state of the run's objects."""

    step: int
    extra: dict[str, Any]
    """``extra`` of rank 0."""
    path: Path


class Checkpointer:
    """Checkpoints of a model; on several ranks, which have all or a part of it each, all make the same calls.

    A handle derives from it and overrides the methods behind ``digest``.
    """

    _ranks = Ranks()
    _lacks_weights = False
    _draws_alike = False
    """True if all ranks draw the same random numbers: a new rank continues from the state of rank 0."""
    _pending: Future[None] | None = None

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        self._model = model
        self._ranks = ranks or self._ranks

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

        Call it between steps. It copies the state; then a thread writes the copy into a hidden folder, and renames it
        once it is on the disk: a killed run leaves the last complete checkpoint. The next ``save``, ``load``,
        ``finish_saving`` or ``remove`` waits for the thread and raises its error.

        Args:
            folder: The run's checkpoints; all ranks see it.
            step: The loop's count, which ``load`` returns.
            optimizer: Over the model's parameters; or several, in a sequence or by name.
            scheduler: Anything with a ``state_dict()`` of plain data, the same on every rank; or several.
            scaler: A ``torch.amp.GradScaler``, or anything with such a ``state_dict()``.
            companions: EMA models and other modules beside the model, by name. On ranks, copies of the model as each
                rank has it, or whole.
            generators: The loop's own random generators by name; each rank saves its own.
            extra: Plain data of rank 0: numbers, strings, None, small tensors, and lists, tuples and dicts of these.
            keep: Number of checkpoints in the folder; older ones are removed once this one is complete.

        Raises:
            NoRoomError: The disk was full during the previous save, which left nothing; this one has not begun.
            MosaicError: The previous save failed otherwise, the folder cannot be written, or ranks differ.
            TypeError: A checkpoint cannot hold one of the values; names it.
        """
        from mosaic import __version__

        state, ranks = SavedState(self._model, optimizer, scheduler, scaler, companions, generators), self._ranks
        self._settle()
        self.finish_saving()
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; keep at least 1")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r} is not a count of steps; use a whole number from 0 on")
        with self._made_whole(state):
            part, tensors = ranks.run_on_all(lambda: Part.of(state, ranks.rank))
            parts, writer = _gather_parts(ranks, state, part, step, str(folder))

            def begin() -> tuple[SavingPlace, Manifest, bytes]:
                content = (json.dumps(state_file(state, parts, extra or {})) + "\n").encode()
                entries = [replace(parts[rank].entries[name], file=_FILE.format(rank)) for name, rank in writer.items()]
                manifest = Manifest(
                    step=step,
                    created=datetime.now(UTC).isoformat(timespec="seconds"),
                    mosaic=__version__,
                    torch=torch.__version__,
                    num_ranks=len(parts),
                    plan=self._plan_name(),
                    files=(),
                    tensors=tuple(sorted(entries, key=lambda entry: entry.name)),
                    tied=parts[0].tied,
                )
                return SavingPlace.make(Path(folder), step), manifest, content

            place, manifest, content = ranks.run_on_first(begin)
            copies = {
                name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
                for name, tensor in tensors.items()
                if writer[name] == ranks.rank
            }
        group = ranks.background_group()

        def complete(files: list[run_folder.FileEntry]) -> None:
            if ranks.rank == 0:
                state_entry = run_folder.write_flushed(place.aside / STATE, content)
                replace(manifest, files=(state_entry, *files)).write(place.aside)
                place.commit(keep)

        def write() -> None:
            try:
                files = _gather_results(group, lambda: write_tensors(place.aside / _FILE.format(ranks.rank), copies))
                _gather_results(group, lambda: complete(files))
            except Exception as error:  # of any kind: all ranks report it
                if ranks.rank == 0:
                    shutil.rmtree(place.aside, ignore_errors=True)
                failure = (
                    f"{place.final} could not be saved: {error}; earlier ones are intact: make room, or choose a "
                    "folder that all ranks can write"
                )
                _LOG.error(failure)  # at once, even if the loop never waits
                raise (NoRoomError if isinstance(error, NoRoomError) else MosaicError)(failure) from error

        # A pool's thread is joined at the end of the process, so the checkpoint is completed.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = thread.submit(write)
        thread.shutdown(wait=False)
        return place.final

    def finish_saving(self) -> None:
        """Waits until the pending checkpoint is on the disk; raises MosaicError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

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
        new_run: bool = False,
    ) -> Loaded | None:
        """Loads a checkpoint, saved under any plan and number of ranks, into the model as it is colocated now.

        It checks every file first. The random generators of a rank continue from the state of the same rank; a new rank
        keeps its own state, and in a pipeline, whose ranks draw alike, continues from rank 0.

        Args:
            folder: The run's checkpoints.
            step: The checkpoint's step; the newest by default.
            optimizer: Receives its saved state, by name or order if several were saved, as do the next four.
            scheduler: Of the learning rate; what is left out is not restored.
            scaler: A ``GradScaler``.
            companions: Modules beside the model, by name.
            generators: Random generators, by name.
            fall_back: Load the newest intact checkpoint, with a warning, where the newest is damaged.
            missing_ok: Return None if no checkpoint exists, as at the first start of a loop that may be restarted.
            new_run: Keep the optimizers' settings, such as learning rates, and the state of random generators.

        Raises:
            InvalidCheckpointError: None exists, it is damaged, or it differs from the model or optimizer, as listed.
        """
        self._settle()
        self.finish_saving()
        ranks, folder = self._ranks, Path(folder)
        state = SavedState(self._model, optimizer, scheduler, scaler, companions, generators)
        if missing_ok and ranks.broadcast(not run_folder.checkpoints_in(folder)):
            return None
        with self._made_whole(state), ExitStack() as files:
            checkpoint = ranks.run_on_first(lambda: _intact(folder, step, fall_back=fall_back))
            if isinstance(checkpoint, str):
                raise InvalidCheckpointError(checkpoint)
            random_ranks = (ranks.rank, 0) if self._draws_alike else (ranks.rank,)
            prepare = bind(_prepare, checkpoint.path, state, files, random_ranks, new_run=new_run)
            restore, extra = ranks.run_on_all(prepare)
            ranks.run_on_all(restore)
        self._lacks_weights = False
        return Loaded(step=checkpoint.step, extra=extra, path=checkpoint.path)

    def export(self, path: str | Path) -> None:
        """Writes the plain model's ``state_dict`` as one safetensors file for ``load_state_dict``.

        All ranks save a checkpoint beside it, from which rank 0 writes the file. Tied weights appear under all of their
        names. If the file cannot be written, MosaicError is raised and an existing file is unchanged.
        """
        path, ranks = Path(path), self._ranks
        aside = path.parent / ranks.broadcast(f".{path.name}.{secrets.token_hex(4)}")
        try:
            checkpoint = self.save(aside, step=0)
            self.finish_saving()
            ranks.run_on_first(lambda: extract_weights(checkpoint, path))
        finally:
            if ranks.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)

    def load_weights(self, path: str | Path, *, partial: bool = False) -> Overlap:
        """Copies weights from a plain safetensors file, or a folder of such files, into the model as it is colocated.

        Each rank opens the file. Other dtypes are converted, as in ``load_state_dict``. One name of a tied weight is
        enough. With ``partial``, tensors whose name and shape fit a different model are loaded.

        Returns:
            The loaded tensors, and with ``partial`` the new, gone and changed ones.

        Raises:
            InvalidCheckpointError: The file is of another model; lists the differences.
            InvalidFileError: It is not such a file, or is truncated.
        """
        self._settle()
        ranks = self._ranks
        with self._made_whole(), ExitStack() as files:

            def compare() -> tuple[dict[str, torch.Tensor], Overlap, dict[str, Any]]:
                own, stored = ModelTensors.of(self._model), open_weights(Path(path), files)
                shapes = {name: ("", file.get_slice(name).get_shape()) for name, file in stored.items()}
                overlap = Overlap.of(own, shapes)
                overlap.check(Path(path), partial=partial)
                return own.here, overlap, stored

            here, overlap, stored = ranks.run_on_all(compare)
            for name, source in overlap.sources.items():
                if name in here:
                    here[name].copy_(stored[source].get_tensor(source))
            ranks.raise_if_any_failed(None)
        self._lacks_weights = False
        return overlap

    def digest(self) -> str:
        """Returns the SHA-256 over all parameters and buffers, the same under any plan and number of ranks."""
        self._settle()
        own = {}
        with self._made_whole():
            for name, tensor in ModelTensors.of(self._model).here.items():
                entry = describe(name, tensor)
                own[name] = f"{entry.dtype} {list(entry.shape)} {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
            digests = ChainMap(*self._ranks.all_gather(own))
        return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()

    def _made_whole(self, state: SavedState | None = None) -> AbstractContextManager[None]:
        """Returns a context in which the tensors of the model and its optimizers are unsharded."""
        return nullcontext()

    def _plan_name(self) -> str:
        return "plain"

    def _settle(self) -> None:
        """Waits for the model's work; a plain model computes in the loop's own order."""


def _gather_parts(
    ranks: Ranks, state: SavedState, part: Part, step: int, folder: str
) -> tuple[list[Part], dict[str, int]]:
    """Gathers the parts of all ranks, compares them, and returns the first rank that has each tensor, its writer."""
    settings = {label: json.dumps([each.kind, *each.settings]) for label, each in part.optimizers.items()}
    labels = [*state.optimizers], [*state.companions], [*state.generators]
    subjects = {"steps": step, "folders": folder, "objects": labels, "settings of optimizers": settings}
    gathered = ranks.all_gather((subjects, part))
    for subject in subjects:
        if any(theirs[subject] != gathered[0][0][subject] for theirs, _ in gathered):
            each = "; ".join(f"rank {rank}: {theirs[subject]}" for rank, (theirs, _) in enumerate(gathered))
            raise ValueError(f"the ranks save different {subject} ({each}); save the same on all ranks")
    parts = [theirs for _, theirs in gathered]
    writer: dict[str, int] = {}
    for rank, own in enumerate(parts):
        for name, entry in own.entries.items():
            first = parts[writer.setdefault(name, rank)].entries[name]
            if first != entry:
                raise MosaicError(
                    f"{name} is {entry.dtype} {list(entry.shape)} on rank {rank} and {first.dtype} {list(first.shape)} "
                    f"on rank {writer[name]}; all ranks have to hold the same"
                )
    if missing := [name for name in parts[0].names if name not in writer]:
        raise MosaicError(f"no rank has {missing[0]} (and {len(missing) - 1} more); it cannot be saved")
    return parts, writer


def _gather_results(group: Any, work: Callable[[], Any]) -> list[Any]:
    """Gathers the results of all ranks; raises on all if one failed: NoRoomError if its disk was full."""
    report: tuple[str | None, bool, Any]
    try:
        report = None, False, work()
    except Exception as error:  # of any kind: all ranks have to raise
        report = f"{type(error).__name__}: {error}", run_folder.is_full(error), None
    reports = gather_objects(group, report)
    if failures := [f"{reason} (rank {rank})" for rank, (reason, _, _) in enumerate(reports) if reason is not None]:
        raise (NoRoomError if any(full for _, full, _ in reports) else MosaicError)("; ".join(failures))
    return [result for _, _, result in reports]


def _intact(folder: Path, step: int | None, *, fall_back: bool) -> Checkpoint | str:
    """Returns the newest intact checkpoint, or the error; without ``fall_back``, only the newest counts."""
    damage: list[str] = []
    for checkpoint in run_folder.choose(folder, step):
        if defects := run_folder.damage_of(checkpoint.path):
            damage += defects
            continue
        if damage and not fall_back:
            return (
                f"{'; '.join(damage)}; the newest intact one before it is {checkpoint.path}: load it with "
                f"step={checkpoint.step}, or with fall_back=True"
            )
        if damage:
            _LOG.warning("%s; going on from %s", "; ".join(damage), checkpoint.path)
        return checkpoint
    return f"{'; '.join(damage)}; no earlier one in {folder} is intact"


def _prepare(
    path: Path, state: SavedState, files: ExitStack, random_ranks: Collection[int], *, new_run: bool
) -> tuple[Callable[[], None], dict[str, Any]]:
    """Compares a checkpoint with the objects of a run; returns a function that changes them, and the saved ``extra``.

    The random state becomes that of the first of ``random_ranks`` that has one.
    """
    stored, saved = StoredTensors(path, files), json.loads((path / STATE).read_text(encoding="utf-8"))
    modules = state.modules()
    model = modules[MODEL]
    if names := ", ".join(sorted(stored.tied.keys() ^ model.tied.keys())):
        raise InvalidCheckpointError(f"{path} is of another model: only one of them ties {names}; tie the same weights")

    def check_names(argument: str, objects: Collection[str], saved: Collection[str]) -> None:
        if objects and set(objects) != set(saved):
            names = [", ".join(name or "a single one" for name in each) or "none" for each in (saved, objects)]
            raise InvalidCheckpointError(
                f"{path} was saved with {argument}= of {names[0]}, not {names[1]}; pass the same ones, or none"
            )

    check_names("companions", state.companions, saved.get("companions", []))
    copies: list[tuple[torch.Tensor, str]] = []
    for prefix, module in modules.items():
        entries = stored.of_module(prefix)
        overlap = Overlap.of(module, {name: (entry.dtype, entry.shape) for name, entry in entries.items()})
        overlap.check(path)
        copies += [(tensor, entries[overlap.sources[name]].name) for name, tensor in module.here.items()]

    def copy_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
        tensor = stored[name]
        return tensor.to(parameter.device if tensor.shape == parameter.shape else "cpu", copy=True)

    restores: list[Callable[[], object]] = []
    saved_optimizers = by_label(saved, "optimizer")
    check_names("optimizer", state.optimizers, saved_optimizers)
    for label, optimizer in state.optimizers.items():
        saved_state = OptimizerState(**saved_optimizers[label])
        restores.append(saved_state.prepare(optimizer, model, copy_of, new_run=new_run))
    for kind, targets in (("scheduler", state.schedulers), ("scaler", state.scalers)):
        plain = by_label(saved, kind)
        check_names(kind, targets, plain)
        restores += [bind(target.load_state_dict, from_plain(plain[label])) for label, target in targets.items()]
    if not new_run:
        check_names("generators", state.generators, saved.get("generators", []))
        for name in [name for rank in random_ranks if (name := f"{RANDOM}{rank}") in stored.entries][:1]:
            random = from_plain(json.loads(bytes(stored[name].tolist())))
            restores.append(bind(set_random_state, random, state.generators))

    def restore() -> None:
        for tensor, name in copies:
            tensor.copy_(stored[name])
        for each in restores:
            each()

    return restore, from_plain(saved["extra"])
