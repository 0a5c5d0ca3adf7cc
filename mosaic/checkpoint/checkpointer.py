"""Saving, loading, and weights as one plain file: the methods of a handle, and of a plain model.

The step waits only for a copy in memory, which a thread writes while training goes on. Loading compares everything
with the run's objects before it changes any of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial as bind
from pathlib import Path
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
    SUFFIX,
    ModelTensors,
    Overlap,
    StoredTensors,
    bytes_of,
    describe,
    open_weights,
    raw,
    replace_with_tensors,
    write_tensors,
)
from mosaic.errors import InvalidCheckpointError, MosaicError, NoRoomError

_LOG = logging.getLogger(__name__)


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

            def begin() -> tuple[SavingPlace, Manifest, bytes]:
                content = (json.dumps(state_file(state, parts, extra or {})) + "\n").encode()
                entries = [replace(parts[rank].entries[name], file=_file_of(rank)) for name, rank in writer.items()]
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
        # A pool's thread is joined at the end of the process, as a checkpoint has to be.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        arguments = place, ranks.rank, ranks.background_group(), manifest, content, keep
        self._pending = thread.submit(_write, copies, *arguments)
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
            optimizer, scheduler, scaler, companions, generators: Receive the state saved from such an object, by name
                or order if several were saved; without an object, its state is ignored.
            fall_back: Load the newest intact checkpoint if the newest is damaged, and log a warning. By default that is
                an error, which names the intact one.
            missing_ok: Return None if no checkpoint exists, as at the first start of a loop that may be restarted.
            new_run: Keep the optimizers' settings, such as learning rates, and the state of random generators.

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

        Rank 0 gathers the whole model in its memory. Tied weights appear under all of their names. If the file cannot
        be written, MosaicError is raised and an existing file is unchanged.
        """
        self._settle()
        ranks = self._the_ranks()
        with self._made_whole():
            tensors = _gather_tensors(self._model, ranks)
            ranks.run_on_first(lambda: replace_with_tensors(Path(path), tensors))

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
        """Returns the SHA-256 over all parameters and buffers, the same under any plan and number of ranks."""
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
        """Waits for the model's work; a plain model computes in the loop's own order."""


def _gather_parts(ranks: Ranks, part: Part, step: int, folder: str) -> tuple[list[Part], dict[str, int]]:
    """Gathers the parts of all ranks, compares them, and returns the first rank that has each tensor, its writer."""
    settings = {label: json.dumps([each.kind, *each.settings]) for label, each in part.optimizers.items()}
    gathered = ranks.all_gather((step, folder, part.labels, settings, part))
    subjects = ("steps", "folders", "optimizers, companions or generators", "settings of their optimizers")
    for index, subject in enumerate(subjects):
        if any(request[index] != gathered[0][index] for request in gathered):
            each = "; ".join(f"rank {rank}: {request[index]}" for rank, request in enumerate(gathered))
            raise ValueError(f"the ranks save different {subject} ({each}); save the same on all ranks")
    parts = [request[-1] for request in gathered]
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


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}{SUFFIX}"


def _write(
    tensors: Mapping[str, torch.Tensor],
    place: SavingPlace,
    rank: int,
    group: Any,
    manifest: Manifest,
    state: bytes,
    keep: int,
) -> None:
    """Writes this rank's file, and on rank 0 the rest; a failure is logged at once, even if the loop never waits."""

    def write_own() -> run_folder.FileEntry:
        if not place.aside.is_dir():
            raise MosaicError(f"rank 0 made {place.aside}, and it is not there on this rank")
        return write_tensors(place.aside / _file_of(rank), tensors)

    def complete() -> None:
        if rank == 0:
            state_entry = run_folder.write_flushed(place.aside / STATE, state)
            replace(manifest, files=(state_entry, *files)).write(place.aside)
            place.commit(keep)

    try:
        files = _gather_results(group, write_own)
        _gather_results(group, complete)
    except Exception as error:  # of any kind: all ranks report it
        if rank == 0:
            shutil.rmtree(place.aside, ignore_errors=True)
        failure = (
            f"{place.final} could not be saved: {error}; earlier ones are intact: make room, or choose a folder that "
            "all ranks can write"
        )
        _LOG.error(failure)
        raise (NoRoomError if isinstance(error, NoRoomError) else MosaicError)(failure) from error


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


def _gather_tensors(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Returns the contiguous tensors of a model's ``state_dict`` on rank 0, each from the first rank that has it."""
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
        elif tensor.numel() and ranks.rank == source[name]:  # no collective call: a thread may be saving in the group
            dist.send(raw(tensor), dst=0, group=group)
        elif ranks.rank == 0:
            whole[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if tensor.numel():
                dist.recv(raw(whole[name]), src=source[name], group=group)
    return {name: whole[first] for name, first in own.names.items()} if ranks.rank == 0 else {}


def _intact(folder: Path, step: int | None, ranks: Ranks, *, fall_back: bool) -> Checkpoint:
    """Returns the newest intact checkpoint, which rank 0 verifies; without ``fall_back``, only the newest counts."""

    def verify() -> tuple[Checkpoint | None, list[str]]:
        damaged: list[str] = []
        for checkpoint in run_folder.choose(folder, step):
            if not (damage := run_folder.damage_of(checkpoint.path)):
                return checkpoint, damaged
            damaged += damage
        return None, damaged

    checkpoint, damaged = ranks.run_on_first(verify)
    if checkpoint is None:
        raise InvalidCheckpointError(f"{'; '.join(damaged)}; no earlier one in {folder} is intact")
    if damaged and not fall_back:
        raise InvalidCheckpointError(
            f"{'; '.join(damaged)}; the newest intact one before it is {checkpoint.path}: load it with "
            f"step={checkpoint.step}, or with fall_back=True"
        )
    if damaged and ranks.rank == 0:
        _LOG.warning("%s; going on from %s", "; ".join(damaged), checkpoint.path)
    return checkpoint


class _Reader:
    """The state in a checkpoint of the objects of a run.

    The constructor compares and changes nothing; ``restore`` then changes the objects.
    """

    def __init__(self, path: Path, state: SavedState, files: ExitStack, *, new_run: bool) -> None:
        self._path, self._state, self._new_run = path, state, new_run
        self._stored = StoredTensors(path, files)
        self._copies: list[tuple[torch.Tensor, str]] = []
        self._restores: list[Callable[[], object]] = []
        self.saved: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        modules = state.modules()
        model = modules[MODEL]
        if names := ", ".join(sorted(self._stored.tied.keys() ^ model.tied.keys())):
            raise InvalidCheckpointError(
                f"{path} is of another model: only one of them ties {names}; tie the same weights"
            )
        self._check_names("companions", state.companions or {}, self.saved.get("companions", []))
        for prefix, module in modules.items():
            saved = self._stored.of_module(prefix)
            overlap = Overlap.of(module, {name: (entry.dtype, entry.shape) for name, entry in saved.items()})
            overlap.check(path)
            self._copies += [(tensor, saved[overlap.sources[name]].name) for name, tensor in module.here.items()]
        saved_optimizers = by_label(self.saved, "optimizer")
        self._check_names("optimizer", state.optimizers, saved_optimizers)
        for label, optimizer in state.optimizers.items():
            saved_state, (own, _) = OptimizerState(**saved_optimizers[label]), OptimizerState.of(optimizer, model)
            saved_state.check_fits(own, model)
            restore = bind(saved_state.restore, optimizer, own, model, self._copy_of, with_settings=not new_run)
            self._restores.append(restore)
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
            tensor.copy_(self._stored[name])
        for restore in self._restores:
            restore()
        names = [name for rank in random_ranks if (name := f"{RANDOM}{rank}") in self._stored.entries]
        if names and not self._new_run:
            random = from_plain(json.loads(bytes(self._stored[names[0]].tolist())))
            set_random_state(random, self._state.generators)

    def _copy_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a copy of a stored tensor of an optimizer, beside its parameter if it has the same shape."""
        stored = self._stored[name]
        return stored.to(parameter.device if stored.shape == parameter.shape else "cpu", copy=True)

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
