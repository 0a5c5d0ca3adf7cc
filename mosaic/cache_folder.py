"""The user's own folder for measurements: where it is, and how much is in it. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderUse:
    """How much a folder holds."""

    num_files: int
    """Files of measurements in it; 0 where there is no such folder yet."""
    num_bytes: int
    """Their sizes together, in bytes."""


def default_cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the user's own folder for profiles: ``$XDG_CACHE_HOME/mosaic/profiles``, else under ``~/.cache``.

    As the XDG base directory specification has it, a relative ``XDG_CACHE_HOME`` counts as none.

    Args:
        environ: Environment to look in; this process's own where None.

    Raises:
        RuntimeError: There is no home folder either.
    """
    base = Path((os.environ if environ is None else environ).get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "mosaic" / "profiles"


def folder_use(folder: Path) -> FolderUse:
    """Returns how many measurement files a folder holds and how large they are; a file that vanishes does not count."""
    sizes = []
    for path in folder.glob("*.json"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # deleted meanwhile, which is safe at any time
            continue
    return FolderUse(num_files=len(sizes), num_bytes=sum(sizes))
