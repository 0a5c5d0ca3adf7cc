"""The origin of a result file: the command, the commit, the versions and the date."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Origin of a result."""

    command: str
    """Without folders of absolute paths, so that it may be published."""
    created: str
    commit: str
    """Followed by ``+`` if files had been changed; empty outside of a clone."""
    python_version: str

    @staticmethod
    def here() -> Provenance:
        words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
        return Provenance(
            command=shlex.join([Path(sys.argv[0]).name, *words]),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            python_version=platform.python_version(),
        )


def _commit() -> str:
    top = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(top)]
    if not (top / ".git").exists():
        return ""
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True)
        changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + ("+" if changed else "")
