"""A checkpoint's table of contents, a JSON file: its files with their checksums, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from mosaic.artifact import fingerprint, load, to_json
from mosaic.errors import InvalidCheckpointError, InvalidFileError

MANIFEST = "manifest.json"
"""Name of the manifest in a checkpoint's folder."""
STATE = "state.json"
"""Name of the file with all state except tensors."""
MODEL = "model."
"""Prefix of the names of the model's tensors."""
COMPANION = "companion."
"""Prefix of the names of tensors of companion modules."""
RANDOM = "random."
"""Prefix of the names of ranks' random states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint."""

    name: str
    """Name in the checkpoint's folder."""
    num_bytes: int
    """Its length."""
    sha256: str
    """Checksum of its content, in hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a checkpoint, whole in one file."""

    name: str
    """``model.NAME``, ``companion.LABEL/NAME``, ``optimizer.NAME/KEY``, ``optimizer.LABEL/NAME/KEY`` or
    ``random.RANK``."""
    dtype: str
    """As in safetensors, such as ``F32``."""
    shape: tuple[int, ...]
    """Its size."""
    file: str
    """The file that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a complete checkpoint."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    step: int
    """The step that it was saved at, as the loop counts."""
    created: str
    """Date and time, ISO 8601, UTC."""
    mosaic: str
    """Version of Mosaic that wrote it."""
    torch: str
    """Version of torch that wrote it."""
    num_ranks: int
    """Number of ranks that wrote it; any number may read it."""
    plan: str
    """Fingerprint of the plan that ran; any plan may read it."""
    files: tuple[FileEntry, ...]
    """All other files."""
    tensors: tuple[TensorEntry, ...]
    """All tensors."""
    tied: dict[str, str]
    """Other keys of the model's ``state_dict``, and the key under which their tensor is saved."""
    digest: str = ""
    """Fingerprint of all of the above."""

    def sealed(self) -> Manifest:
        """Returns a copy with its digest."""
        return replace(self, digest=fingerprint(replace(self, digest="")))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.num_bytes for file in self.files)

    def to_json(self) -> str:
        """Returns the file's text."""
        return to_json(self)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            InvalidCheckpointError: It is missing, cut short or changed.
        """
        try:
            manifest = load(Manifest, folder / MANIFEST)
        except InvalidFileError as error:
            raise InvalidCheckpointError(str(error)) from error
        if manifest.sealed() != manifest:
            raise InvalidCheckpointError(
                f"{folder / MANIFEST}: its content was changed: digest={manifest.digest!r}, and its "
                f"content has {manifest.sealed().digest!r}; load an earlier checkpoint"
            )
        return manifest
