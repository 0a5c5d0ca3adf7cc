"""Reading the plans and profiles that Mosaic saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from mosaic import artifact
from mosaic.errors import InvalidFileError
from mosaic.plan import Plan
from mosaic.profile import Profile

_Artifact = TypeVar("_Artifact", Plan, Profile)


def load(path: str | Path) -> Plan | Profile:
    """Reads the file of ``plan.save(path)``, ``profile.save(path)``, ``mosaic plan`` or ``mosaic profile``.

    Raises:
        InvalidFileError: The file is missing, damaged, or holds neither a plan nor a profile.
    """
    path = Path(path)
    content = artifact.load(dict[str, Any], path)
    if "samples" in content:
        return artifact.load(Profile, path)
    if "stages" in content:
        return artifact.load(Plan, path)
    raise InvalidFileError(f"{path} is neither a plan nor a profile; see mosaic plan and mosaic profile")


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
    raise InvalidFileError(f"{value} holds no {name.lower()}; pass a plan as plan=, a profile as Options(profile=...)")
