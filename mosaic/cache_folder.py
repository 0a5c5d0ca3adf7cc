"""The user's own folder for measurements. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def default_cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the user's own folder for profiles: ``$XDG_CACHE_HOME/mosaic/profiles``, else under ``~/.cache``.

    As the XDG base directory specification has it, a relative ``XDG_CACHE_HOME`` counts as none. ``environ`` is by
    default this process's own; RuntimeError without a home folder.
    """
    base = Path((os.environ if environ is None else environ).get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "mosaic" / "profiles"
