"""Reading the plans and profiles that Mosaic saved."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from mosaic import artifact
from mosaic.errors import InvalidFileError, InvalidPlanError, InvalidProfileError
from mosaic.plan import Plan
from mosaic.profile import Profile

_Artifact = TypeVar("_Artifact", Plan, Profile)


def load(path: str | Path) -> Plan | Profile:
    """Reads a plan or a profile from a JSON file, whichever it holds.

    ``plan.save(path)``, ``profile.save(path)``, ``mosaic plan`` and ``mosaic profile`` write such files.

    Raises:
        InvalidFileError: The file is missing, damaged, or holds neither a plan nor a profile.
    """
    path = Path(path)
    with suppress(OSError, ValueError, RecursionError):  # reading it as a plan names the reason
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "samples" in content:
            return artifact.load(Profile, path)
        if not isinstance(content, dict) or "stages" not in content:
            raise InvalidFileError(f"{path} is neither a plan nor a profile; see mosaic plan and mosaic profile")
    return artifact.load(Plan, path)


def load_as(kind: type[_Artifact], value: _Artifact | str | Path | None) -> _Artifact | None:
    """Returns a plan or a profile, read from a file where the value is its path."""
    if value is None or isinstance(value, kind):
        return value
    name = kind.__name__
    if not isinstance(value, str | Path):
        raise TypeError(
            f"{name.lower()}={value!r} is a {type(value).__name__}; pass a mosaic.{name} or its file's path"
        )
    if isinstance(loaded := load(value), kind):
        return loaded
    if kind is Plan:
        raise InvalidPlanError(f"{value} holds a profile; pass it as Options(profile=...), or plan from it first")
    raise InvalidProfileError(f"{value} holds a plan; pass it as plan=")
