"""Saving, loading, and weights as one plain file: the methods of a handle, and of a plain model.

The step waits only for a copy in memory, which a thread writes while training goes on. Loading compares everything
with the run's objects before it changes any of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial as bind
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mosaic.checkpoint import folder as run_folder
from mosaic.checkpoint.folder import MODEL, RANDOM, STATE, Checkpoint, Manifest, SavingPlace
from mosaic.checkpoint.ranks import Ranks, gather_objects
from mosaic.checkpoint.state import (
    OneOrSeveral,
    OptimizerState,
    Part,
    SavedState,
    by_label,
    from_plain,
    set_random_state,
    state_file,
)
from mosaic.checkpoint.tensors import (
    DTYPES,
    SUFFIX,
    ModelTensors,
    Overlap,
    bytes_of,
    describe,
    open_tensors,
    open_weights,
    raw,
    replace_with_tensors,
    write_tensors,
)
from mosaic.errors import InvalidCheckpointError, MosaicError, NoRoomError

_LOG = logging.getLogger(__name__)

NICENESS = 10
"""Of the writing thread: beside a computing thread on the same core it gets a tenth of the core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Content of a checkpoint beside the state of the run's objects."""

    step: int
    """The step that it was saved at."""
    extra: dict[str, Any]
    """``extra`` of rank 0."""
    path: Path
    """Its folder."""


class Checkpointer:
    """Checkpoints of a model; on several ranks, all of them make the same calls.

    A handle derives from it and overrides the methods behind ``digest``.

    Args:
        model: The model.
        ranks: The ranks that save together, each with all or a part of the model; by default this process alone.
    """

    _ranks = Ranks()
    _lacks_weights = False
    _draws_alike = False
    """True if all ranks draw the same random numbers: a new rank continues from the state of rank 0."""
    _pending: tuple[SavingPlace, Future[None]] | None = None
    _copies: Mapping[str, torch.Tensor] = MappingProxyType({})

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

        Call it between steps. It copies the state and returns; then a thread writes the copy into a hidden folder, and
        renames it once it is on the disk. A run that is killed at any instant leaves the last complete checkpoint. The
        next ``save``, ``load``, ``finish_saving`` or ``remove`` waits for the thread and raises its error.

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

        Returns:
            The folder of the checkpoint.

        Raises:
            NoRoomError: The disk was full during the previous save, which left nothing; this one has not begun.
            MosaicError: The previous save failed otherwise, the folder cannot be written, or ranks differ.
            TypeError: A checkpoint cannot hold one of the values; names it.
        """
        state, ranks = SavedState(self._model, optimizer, scheduler, scaler, companions, generators), self._the_ranks()
        self._settle()
        self.finish_saving()
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; keep at least 1")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r} is not a count of steps; use a whole number from 0 on")
        with self._made_whole(state):
            part, tensors = ranks.run_on_all(lambda: Part.of(state, ranks.rank))
            parts, writer = _gather_parts(ranks, part, step, str(folder))

            def begin() -> tuple[SavingPlace, Manifest, bytes] | None:
                if ranks.rank:
                    return None
                content = (json.dumps(state_file(state, parts, extra or {})) + "\n").encode()
                return SavingPlace.make(Path(folder), step), self._manifest(step, parts, writer), content

            begun = ranks.run_on_all(begin)
            place = ranks.broadcast(begun and begun[0])
            assert place is not None
            copies = self._copy({name: each for name, each in tensors.items() if writer[name] == ranks.rank})
        # A pool's thread is joined at the end of the process, as a checkpoint has to be.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=_lower_priority)
        arguments = place, ranks.rank, ranks.background_group(), begun and begun[1:], keep
        self._pending = place, thread.submit(_write, copies, *arguments)
        thread.shutdown(wait=False)
        return place.final

    def _manifest(self, step: int, parts: Sequence[Part], writer: Mapping[str, int]) -> Manifest:
        """Returns the manifest, still without files."""
        from mosaic import __version__

        entries = [replace(parts[rank].entries[name], file=_file_of(rank)) for name, rank in sorted(writer.items())]
        return Manifest(
            step=step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            mosaic=__version__,
            torch=torch.__version__,
            num_ranks=len(parts),
            plan=self._plan_name(),
            files=(),
            tensors=tuple(entries),
            tied=parts[0].tied,
        )

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns copies that training does not touch, valid until the next call; pinned for tensors on a GPU.

        Later copies reuse the memory: fresh memory takes several times as long as copying into it.
        """
        old, self._copies, copies = self._copies, {}, {}
        for name, tensor in tensors.items():
            copy = old.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name] = copy.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._copies = copies
        return copies

    def finish_saving(self) -> None:
        """Waits until the pending checkpoint, if any, is on the disk.

        Raises:
            MosaicError: It could not be written. Earlier checkpoints are unchanged.
        """
        if self._pending is None:
            return
        (place, future), self._pending = self._pending, None
        if (error := future.exception()) is not None:
            raise (NoRoomError if isinstance(error, NoRoomError) else MosaicError)(_failure(place, error)) from error

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
            step: Step of the checkpoint; the newest by default.
            optimizer, scheduler, scaler, companions, generators: Receive the state saved from such an object, by name
                or order if several were saved; without an object, its state is ignored.
            fall_back: Load the newest intact checkpoint if the newest is damaged, and log a warning. By default that is
                an error, which names the intact one.
            missing_ok: Return None if no checkpoint exists, as at the first start of a loop that may be restarted.
            new_run: Keep the optimizers' settings, such as learning rates, and the state of random generators.

        Returns:
            The step, ``extra`` and the folder.

        Raises:
            InvalidCheckpointError: No checkpoint exists, it is damaged, or it differs from the model or optimizer;
                lists the differences. A model with other parameters loads exported weights (``load_weights``).
        """
        self._settle()
        self.finish_saving()
        ranks, folder = self._the_ranks(), Path(folder)
        state = SavedState(self._model, optimizer, scheduler, scaler, companions, generators)
        if missing_ok and ranks.broadcast(not run_folder.checkpoints_in(folder)):
            return None
        with self._made_whole(state), ExitStack() as files:
            checkpoint = _intact(folder, step, ranks, fall_back=fall_back)
            reader = ranks.run_on_all(lambda: _Reader(checkpoint.path, state, files, new_run=new_run))
            random_ranks = (ranks.rank, 0) if self._draws_alike else (ranks.rank,)
            ranks.run_on_all(lambda: reader.restore(random_ranks))
        self._lacks_weights = False
        return Loaded(step=checkpoint.step, extra=from_plain(reader.saved["extra"]), path=checkpoint.path)

    def export(self, path: str | Path) -> None:
        """Writes the plain model's ``state_dict`` as one safetensors file for ``load_state_dict``.

        Rank 0 gathers the whole model in its memory. Tied weights appear under all of their names.

        Raises:
            MosaicError: The file cannot be written, and does not exist.
        """
        self._settle()
        ranks = self._the_ranks()
        with self._made_whole():
            tensors = _gather_tensors(self._model, ranks)
            ranks.run_on_all(lambda: replace_with_tensors(Path(path), tensors) if ranks.rank == 0 else None)

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
        ranks = self._the_ranks()
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
        """Returns the SHA-256 over all parameters and buffers, the same under any plan and number of ranks.

        The first rank that has a tensor provides its bytes.
        """
        self._settle()
        own, digests = {}, {}
        with self._made_whole():
            for name, tensor in ModelTensors.of(self._model).here.items():
                entry = describe(name, tensor)
                own[name] = f"{entry.dtype} {list(entry.shape)} {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
            for by_name in reversed(self._the_ranks().all_gather(own)):
                digests.update(by_name)
        return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()

    def _the_ranks(self) -> Ranks:
        return self._ranks

    def _made_whole(self, state: SavedState | None = None) -> AbstractContextManager[None]:
        """Returns a context in which the tensors of the model and its optimizers are unsharded."""
        return nullcontext()

    def _plan_name(self) -> str:
        return "plain"

    def _settle(self) -> None:
        """Does nothing: a plain model computes in the loop's own order."""


# Saving.


def _gather_parts(ranks: Ranks, part: Part, step: int, folder: str) -> tuple[list[Part], dict[str, int]]:
    """Gathers the parts of all ranks, and the rank that writes each tensor: those that have the same take turns.

    Raises:
        ValueError: The ranks save different things.
        MosaicError: Two ranks have different tensors of one name, or no rank has a tensor.
    """
    settings = {label: json.dumps([each.kind, *each.settings]) for label, each in part.optimizers.items()}
    gathered = ranks.all_gather((step, folder, part.labels, settings, part))
    subjects = ("steps", "folders", "optimizers, companions or generators", "settings of their optimizers")
    for index, subject in enumerate(subjects):
        if any(request[index] != gathered[0][index] for request in gathered):
            each = "; ".join(f"rank {rank}: {request[index]}" for rank, request in enumerate(gathered))
            raise ValueError(f"the ranks save different {subject} ({each}); save the same on all ranks")
    parts = [request[-1] for request in gathered]
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, own in enumerate(parts):
        for name, entry in own.entries.items():
            holders[name].append(rank)
            if (first := parts[holders[name][0]].entries[name]) != entry:
                raise MosaicError(
                    f"{name} is {entry.dtype} {list(entry.shape)} on rank {rank} and {first.dtype} {list(first.shape)} "
                    f"on rank {holders[name][0]}; all ranks have to hold the same"
                )
    if missing := [name for name in parts[0].names if name not in holders]:
        raise MosaicError(f"no rank has {missing[0]} (and {len(missing) - 1} more); it cannot be saved")
    largest_first = sorted(holders, key=lambda name: (-math.prod(parts[holders[name][0]].entries[name].shape), name))
    return parts, {name: holders[name][turn % len(holders[name])] for turn, name in enumerate(largest_first)}


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}{SUFFIX}"


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

    def write_own() -> run_folder.FileEntry:
        if not place.aside.is_dir():
            raise MosaicError(f"rank 0 made {place.aside}, and it is not there on this rank")
        return write_tensors(place.aside / _file_of(rank), tensors)

    def complete() -> None:
        if contents is not None:
            manifest, state = contents
            state_entry = run_folder.write_flushed(place.aside / STATE, state)
            replace(manifest, files=(state_entry, *files)).write(place.aside)
            place.commit(keep)

    try:
        files = _gather_results(group, write_own)
        _gather_results(group, complete)
    except Exception as error:  # of any kind: it is raised again
        _LOG.error(_failure(place, error))
        if rank == 0:
            shutil.rmtree(place.aside, ignore_errors=True)
        raise


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


def _failure(place: SavingPlace, error: BaseException) -> str:
    reason = str(error) if isinstance(error, MosaicError) else f"{type(error).__name__}: {error}"
    return (
        f"{place.final} could not be saved: {reason}; earlier ones are intact: make room, or choose a folder that all "
        "ranks can write"
    )


def _gather_tensors(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Returns the contiguous tensors of a model's ``state_dict`` on rank 0, and nothing on the other ranks.

    Each comes from the first rank that has it.
    """
    own = ranks.run_on_all(lambda: ModelTensors.of(model))
    ranks.run_on_all(lambda: [describe(name, tensor) for name, tensor in own.tensors.items()])
    names_by_rank = ranks.all_gather(sorted(own.here))
    source = {name: rank for rank in reversed(range(ranks.size)) for name in names_by_rank[rank]}
    if missing := [name for name in own.tensors if name not in source]:
        raise MosaicError(f"no rank has {missing[0]} (and {len(missing) - 1} more); the model cannot be exported")
    group, whole = ranks.background_group(), {}
    for name, tensor in own.tensors.items():
        if ranks.rank == source[name] == 0:
            whole[name] = tensor.detach().cpu().contiguous()
        elif tensor.numel() and ranks.rank == source[name]:
            dist.send(raw(tensor), dst=0, group=group)
        elif ranks.rank == 0:
            whole[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if tensor.numel():
                dist.recv(raw(whole[name]), src=source[name], group=group)
    return {name: whole[first] for name, first in own.names.items()} if ranks.rank == 0 else {}


# Loading.


def _intact(folder: Path, step: int | None, ranks: Ranks, *, fall_back: bool) -> Checkpoint:
    """Returns the newest intact checkpoint, the same on all ranks, each of which verifies some files."""
    damaged: list[str] = []
    for checkpoint in ranks.broadcast(ranks.run_on_all(lambda: () if ranks.rank else run_folder.choose(folder, step))):
        reports = ranks.all_gather(run_folder.damage_of(checkpoint.path, part=ranks.rank, parts=ranks.size))
        # Every rank reads the manifest: several may report the same sentence.
        if damage := list(dict.fromkeys(sentence for report in reports for sentence in report)):
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
    """The state in a checkpoint of the objects of a run.

    The constructor compares and changes nothing; ``restore`` then changes the objects.

    Raises:
        InvalidCheckpointError: The checkpoint differs from the objects.
    """

    def __init__(self, path: Path, state: SavedState, files: ExitStack, *, new_run: bool) -> None:
        self._path, self._state, self._files, self._new_run = path, state, files, new_run
        manifest = Manifest.read(path)
        self._stored = {tensor.name: tensor for tensor in manifest.tensors}
        self._open: dict[str, Any] = {}
        self._copies: list[tuple[torch.Tensor, str]] = []
        self._restores: list[Callable[[], object]] = []
        self.saved: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        modules = state.modules()
        model = modules[MODEL]
        if manifest.tied.keys() != model.tied.keys():
            names = ", ".join(sorted(manifest.tied.keys() ^ model.tied.keys()))
            raise InvalidCheckpointError(
                f"{path} is of another model: only one of them ties {names}; tie the same weights"
            )
        self._check_names("companions", state.companions or {}, self.saved.get("companions", []))
        for prefix, module in modules.items():
            self._fit_module(prefix, module, manifest.tied if prefix == MODEL else {})
        saved_optimizers = by_label(self.saved, "optimizer")
        self._check_names("optimizer", state.optimizers, saved_optimizers)
        for label, optimizer in state.optimizers.items():
            saved, (own, _) = OptimizerState(**saved_optimizers[label]), OptimizerState.of(optimizer, model)
            saved.check_fits(own, model)
            self._restores.append(bind(saved.restore, optimizer, own, model, self._copy_of, with_settings=not new_run))
        scalers = {} if state.scaler is None else {"": state.scaler}
        for kind, targets in (("scheduler", state.schedulers), ("scaler", scalers)):
            plain = by_label(self.saved, kind)
            self._check_names(kind, targets, plain)
            for label, target in targets.items():
                self._restores.append(bind(target.load_state_dict, from_plain(plain[label])))
        if not new_run:
            self._check_names("generators", state.generators or {}, self.saved.get("generators", []))

    def restore(self, random_ranks: tuple[int, ...]) -> None:
        """Changes the objects, and the random state to that of the first of ``random_ranks`` that has one."""
        for tensor, name in self._copies:
            tensor.copy_(self._tensor(name))
        for restore in self._restores:
            restore()
        names = [name for rank in random_ranks if (name := f"{RANDOM}{rank}") in self._stored]
        if names and not self._new_run:
            random = from_plain(json.loads(bytes(self._tensor(names[0]).tolist())))
            set_random_state(random, self._state.generators)

    def _tensor(self, name: str) -> torch.Tensor:
        """Returns a stored tensor, which may be a view of its file."""
        file = self._stored[name].file
        if file not in self._open:
            self._open[file] = self._files.enter_context(open_tensors(self._path / file))
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor

    def _copy_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a copy of a stored tensor of an optimizer, beside its parameter if it has the same shape."""
        entry = self._stored[name]
        device = parameter.device if entry.shape == tuple(parameter.shape) else torch.device("cpu")
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device).copy_(self._tensor(name))

    def _fit_module(self, prefix: str, module: ModelTensors, tied: Mapping[str, str]) -> None:
        saved = {name.removeprefix(prefix): each for name, each in self._stored.items() if name.startswith(prefix)}
        saved |= {name: saved[first] for name, first in tied.items()}
        overlap = Overlap.of(module, {name: (entry.dtype, entry.shape) for name, entry in saved.items()})
        overlap.check(self._path)
        for name, tensor in module.here.items():
            self._copies.append((tensor, saved[overlap.sources[name]].name))

    def _check_names(self, argument: str, objects: Collection[str], saved: Collection[str]) -> None:
        """Raises InvalidCheckpointError if objects are passed and others, or none, were saved."""
        if not objects or set(objects) == set(saved):
            return
        if not saved:
            raise InvalidCheckpointError(f"{self._path} was saved without {argument}=; load it without, too")
        names = [", ".join(name or "a single one" for name in each) for each in (saved, objects)]
        raise InvalidCheckpointError(
            f"{self._path} was saved with {argument}= of {names[0]}, not {names[1]}; pass the same ones, or none"
        )
