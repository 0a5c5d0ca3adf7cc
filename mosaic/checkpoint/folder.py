"""The folder of a run's checkpoints: files, manifest, complete and removed checkpoints. Needs no torch.

A checkpoint is written in a hidden folder and renamed once it is on the disk, so no pointer to the newest one can be
stale. Names carry a number that grows with every save: a run that went back to an earlier step replaces nothing::

    checkpoints/
        00000007-step-700/      complete: manifest.json, state.json, rank-00000.safetensors, ...
        00000008-step-800/
        .saving-00000009-3f2a/  being written, or left by a killed run: never read
        .dropped-00000006-...   being removed: never read
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

from mosaic.artifact import fingerprint, load, to_json
from mosaic.errors import InvalidCheckpointError, InvalidFileError, MosaicError, NoRoomError

_LOG = logging.getLogger(__name__)
_COMPLETE = re.compile(r"(\d{8,})-step-(\d+)")
_HIDDEN = re.compile(r"\.(?:saving|dropped)-(\d{8,})-.*")

MANIFEST = "manifest.json"
STATE = "state.json"
"""All state except tensors."""
MODEL, COMPANION, OPTIMIZER, RANDOM = "model.", "companion.", "optimizer.", "random."
"""Prefixes of the names of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a checkpoint, whole in one file."""

    name: str
    """``model.NAME``, ``companion.LABEL/NAME``, ``optimizer.[LABEL/]NAME/KEY`` or ``random.RANK``."""
    dtype: str
    """As in safetensors, such as ``F32``."""
    shape: tuple[int, ...]
    file: str = ""
    """Empty while no file has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The table of contents of a complete checkpoint."""

    schema_version: int = 1
    step: int
    created: str
    """ISO 8601, UTC."""
    mosaic: str
    torch: str
    num_ranks: int
    plan: str
    """Fingerprint of the plan that ran."""
    files: tuple[FileEntry, ...]
    """All files except the manifest."""
    tensors: tuple[TensorEntry, ...]
    tied: dict[str, str]
    """Other keys of the model's ``state_dict``, and the key under which their tensor is saved."""
    digest: str = ""
    """Fingerprint of all of the above."""

    @property
    def computed_digest(self) -> str:
        return fingerprint(replace(self, digest=""))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def write(self, folder: Path) -> None:
        write_flushed(folder / MANIFEST, to_json(replace(self, digest=self.computed_digest)).encode())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads a manifest; InvalidCheckpointError if it is missing, cut short or changed."""
        try:
            manifest = load(Manifest, folder / MANIFEST)
        except InvalidFileError as error:
            raise InvalidCheckpointError(str(error)) from error
        if manifest.digest != manifest.computed_digest:
            raise InvalidCheckpointError(f"{folder / MANIFEST} was changed: it has another digest than its content")
        return manifest


class Checkpoint(NamedTuple):
    """A complete checkpoint on the disk."""

    serial: int
    """Number of the save; the newest has the largest."""
    step: int
    path: Path


def checkpoints_in(folder: Path) -> tuple[Checkpoint, ...]:
    """Returns the complete checkpoints of a run, the newest first."""
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    matches = [(path, match) for path in paths if (match := _COMPLETE.fullmatch(path.name))]
    return tuple(sorted((Checkpoint(int(match[1]), int(match[2]), path) for path, match in matches), reverse=True))


def choose(folder: Path, step: int | None) -> tuple[Checkpoint, ...]:
    """Returns the checkpoints to try, in order: the newest, or the newest of a step, and then the earlier ones."""
    complete = checkpoints_in(folder)
    if not complete:
        raise InvalidCheckpointError(f"there is no complete checkpoint in {folder}; pass the folder of save()")
    chosen = tuple(dropwhile(lambda checkpoint: step not in (None, checkpoint.step), complete))
    if not chosen:
        steps = ", ".join(str(checkpoint.step) for checkpoint in complete)
        raise InvalidCheckpointError(f"there is no checkpoint of step={step} in {folder}; there are steps {steps}")
    return chosen


def damage_of(checkpoint: Path) -> tuple[str, ...]:
    """Returns the defects of a checkpoint, a sentence each; an intact one has none."""
    try:
        manifest = Manifest.read(checkpoint)
    except InvalidCheckpointError as error:
        return (str(error),)
    defects = []
    for file in manifest.files:
        path = checkpoint / file.name
        try:
            if (length := path.stat().st_size) != file.num_bytes:
                defects.append(f"{path} has {length} bytes, and {file.num_bytes} were written")
            elif sha256_of(path) != file.sha256:
                defects.append(f"{path} was changed: its SHA-256 is not the one in {MANIFEST}")
        except OSError as error:
            defects.append(f"{path} cannot be read: {error.strerror or error}")
    return tuple(defects)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingPlace:
    """The hidden folder of a checkpoint being written, and its final name."""

    aside: Path
    final: Path

    @staticmethod
    def make(folder: Path, step: int) -> SavingPlace:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            serial = max((checkpoint.serial for checkpoint in checkpoints_in(folder)), default=0) + 1
            aside = folder / f".saving-{serial:08d}-{secrets.token_hex(4)}"
            aside.mkdir()
        except OSError as error:
            raise write_error(folder, error) from error
        return SavingPlace(aside=aside, final=folder / f"{serial:08d}-step-{step}")

    def commit(self, keep: int) -> None:
        """Renames the flushed folder to the newest checkpoint; removes those beyond ``keep``, and killed runs' folders.

        A rename precedes each removal: a half-removed checkpoint never counts.
        """
        flush_folder(self.aside)
        self.aside.rename(self.final)
        folder = self.final.parent
        flush_folder(folder)
        complete = checkpoints_in(folder)
        try:
            for old in complete[keep:]:
                old.path.rename(folder / f".dropped-{old.serial:08d}-{secrets.token_hex(4)}")
            for path in folder.iterdir():
                match = _HIDDEN.fullmatch(path.name)
                if match is not None and int(match[1]) <= complete[0].serial:
                    shutil.rmtree(path)
        except OSError as error:
            _LOG.warning("cannot remove an old checkpoint in %s: %s", folder, error)


def write_flushed(path: Path, content: bytes) -> FileEntry:
    with path.open("xb") as file:
        file.write(content)
    return flushed(path)


def flushed(path: Path) -> FileEntry:
    """Flushes a file to the disk, and describes it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(name=path.name, num_bytes=path.stat().st_size, sha256=sha256_of(path))


def flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_error(path: Path, error: OSError) -> MosaicError:
    return (NoRoomError if is_full(error) else MosaicError)(
        f"cannot write {path}: {error.strerror or error}; choose a folder that can be written, with room left"
    )
