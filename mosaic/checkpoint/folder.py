"""The folder of a run's checkpoints: which are complete, which is the newest, and which are dropped.

A checkpoint is written in a hidden folder beside its place and renamed once it is on the disk; no pointer to the
newest one exists that could be behind or ahead. Names carry a number that grows with every save: a run that went back
to an earlier step and saves the same step again replaces nothing::

    checkpoints/
        00000007-step-700/      complete: manifest.json, state.json, rank-00000.safetensors, ...
        00000008-step-800/
        .saving-00000009-3f2a/  being written, or left by a killed run: never read
        .dropped-00000006-...   being removed: never read

This file needs no torch.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mosaic.checkpoint.disk import is_full, remove_folder, rename_flushed, sha256_of
from mosaic.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from mosaic.errors import InvalidCheckpointError, MosaicError, NoRoomError

_LOG = logging.getLogger(__name__)
_COMPLETE = re.compile(r"(\d{8,})-step-(\d+)")
_ASIDE = re.compile(r"\.(?:saving|dropped)-(\d{8,})-.*")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    serial: int
    """Number of the save; the newest has the largest."""
    step: int
    """The step that it was saved at."""
    path: Path
    """Its folder."""


def checkpoints_in(folder: Path) -> tuple[Checkpoint, ...]:
    """Returns the complete checkpoints of a run, the newest first."""
    if not folder.is_dir():
        return ()
    complete = []
    for path in folder.iterdir():
        match = _COMPLETE.fullmatch(path.name)
        if match is not None and path.is_dir():
            complete.append(Checkpoint(serial=int(match[1]), step=int(match[2]), path=path))
    return tuple(sorted(complete, reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingPlace:
    """The hidden folder of a checkpoint being written, and its final name."""

    aside: Path
    final: Path
    """Its name once it is complete."""

    @staticmethod
    def make(folder: Path, step: int) -> SavingPlace:
        """Makes room for the next checkpoint.

        Raises:
            MosaicError: The folder cannot be made or written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            serial = max((checkpoint.serial for checkpoint in checkpoints_in(folder)), default=0) + 1
            aside = folder / f".saving-{serial:08d}-{secrets.token_hex(4)}"
            aside.mkdir()
        except OSError as error:
            raise (NoRoomError if is_full(error) else MosaicError)(
                f"cannot save in {folder}: {error.strerror or error}; choose a folder that can be written"
            ) from error
        return SavingPlace(aside=aside, final=folder / f"{serial:08d}-step-{step}")

    def commit(self, keep: int) -> None:
        """Renames the flushed folder to the newest checkpoint, and drops those beyond the ``keep`` newest."""
        rename_flushed(self.aside, self.final)
        drop_old(self.final.parent, keep)

    def abandon(self) -> None:
        """Removes the files written so far."""
        remove_folder(self.aside)


def drop_old(folder: Path, keep: int) -> None:
    """Removes all but the ``keep`` newest checkpoints, and remains of killed runs; see ``drop``."""
    complete = checkpoints_in(folder)
    drop(folder, complete[keep:], through=complete[0].serial)


def drop(folder: Path, checkpoints: Sequence[Checkpoint], *, through: int | None = None) -> None:
    """Removes checkpoints, and the hidden folders that killed runs left.

    A rename precedes each removal: a half-removed checkpoint never counts. A failure is logged and ignored, because
    training does not depend on the removal.

    Args:
        folder: The run's checkpoints.
        checkpoints: Those to remove.
        through: The last serial number whose remains are removed; by default all remains are.
    """
    try:
        for old in checkpoints:
            old.path.rename(folder / f".dropped-{old.serial:08d}-{secrets.token_hex(4)}")
        for path in folder.iterdir():
            match = _ASIDE.fullmatch(path.name)
            if match is not None and (through is None or int(match[1]) <= through):
                remove_folder(path)
    except OSError as error:
        _LOG.warning("cannot remove an old checkpoint in %s: %s", folder, error)


def damage_of(checkpoint: Path, *, part: int = 0, parts: int = 1) -> tuple[str, ...]:
    """Returns the defects of a checkpoint, a sentence each; an intact one has none.

    Args:
        checkpoint: Its folder.
        part: Index of the first file to read; then every ``parts``-th. The manifest is always read.
        parts: Number of readers that share the files.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except InvalidCheckpointError as error:
        return (str(error),)
    return tuple(filter(None, (_damage(checkpoint, file) for file in manifest.files[part::parts])))


def _damage(checkpoint: Path, file: FileEntry) -> str | None:
    path = checkpoint / file.name
    try:
        length = path.stat().st_size
        if length != file.num_bytes:
            return f"{path} has {length} bytes, and {file.num_bytes} were written"
        if sha256_of(path) != file.sha256:
            return f"{path} was changed: its SHA-256 is not the one in {MANIFEST}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None


def choose(folder: Path, step: int | None) -> tuple[Checkpoint, ...]:
    """Returns the checkpoints to try, in order: the newest, or the newest of a step, and then the earlier ones.

    Raises:
        InvalidCheckpointError: No checkpoint, or none of that step, exists; lists the existing ones.
    """
    complete = checkpoints_in(folder)
    if not complete:
        raise InvalidCheckpointError(f"there is no complete checkpoint in {folder}; pass the folder of save()")
    first = 0
    if step is not None:
        first = next((index for index, checkpoint in enumerate(complete) if checkpoint.step == step), -1)
        if first < 0:
            raise InvalidCheckpointError(
                f"there is no checkpoint of step={step} in {folder}; there are those of {steps_of(complete)}"
            )
    return complete[first:]


def steps_of(checkpoints: Sequence[Checkpoint]) -> str:
    """Lists the steps of checkpoints, such as ``steps 300, 200``."""
    return f"step{'s' if len(checkpoints) > 1 else ''} {', '.join(str(checkpoint.step) for checkpoint in checkpoints)}"
