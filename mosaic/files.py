"""Reading the plans and profiles that Mosaic saved."""

from __future__ import annotations

import json
from pathlib import Path

from mosaic import artifact
from mosaic.errors import InvalidFileError, InvalidPlanError, InvalidProfileError
from mosaic.plan import Plan
from mosaic.profile import Profile


def load(path: str | Path) -> Plan | Profile:
    """Reads a plan or a profile from a JSON file, whichever it holds.

    ``plan.save(path)``, ``profile.save(path)``, ``mosaic plan`` and ``mosaic profile`` write such files.

    Raises:
        InvalidFileError: The file is missing, damaged, or holds neither a plan nor a profile.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # reading it as a plan names the reason
        return artifact.load(Plan, path)
    keys = content.keys() if isinstance(content, dict) else ()
    if "samples" in keys:
        return artifact.load(Profile, path)
    if "stages" in keys:
        return artifact.load(Plan, path)
    raise InvalidFileError(f"{path} holds neither a plan nor a profile; make one with mosaic plan or mosaic profile")


def plan_of(value: Plan | str | Path | None) -> Plan | None:
    """Returns a plan, read from a file where its path is given.

    Raises:
        InvalidPlanError: The file holds something else.
        TypeError: The value is neither a plan nor a path.
    """
    if value is None or isinstance(value, Plan):
        return value
    if not isinstance(value, str | Path):
        raise TypeError(f"plan={value!r} is a {type(value).__name__}; pass a mosaic.Plan or the path of its file")
    loaded = load(value)
    if not isinstance(loaded, Plan):
        raise InvalidPlanError(f"{value} holds a profile; pass it as Options(profile=...), or plan from it first")
    return loaded


def profile_of(value: Profile | str | Path | None) -> Profile | None:
    """Returns a profile, read from a file where its path is given.

    Raises:
        InvalidProfileError: The file holds something else.
        TypeError: The value is neither a profile nor a path.
    """
    if value is None or isinstance(value, Profile):
        return value
    if not isinstance(value, str | Path):
        raise TypeError(f"profile={value!r} is a {type(value).__name__}; pass a mosaic.Profile or the path of its file")
    loaded = load(value)
    if not isinstance(loaded, Profile):
        raise InvalidProfileError(f"{value} holds a plan; pass it as plan=")
    return loaded
