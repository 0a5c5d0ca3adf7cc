"""A path or a word as each scheduler's language wants it, so that spaces, quotes and signs stay what they are."""

from __future__ import annotations

import re
import shlex


def for_unit(text: str) -> str:
    """For a line of a systemd unit that holds paths; ``%`` would begin a specifier."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{quoted}"'


def for_exec(text: str) -> str:
    """For ``ExecStart=``, where ``$`` would begin a variable, too."""
    return for_unit(text).replace("$", "$$")


def for_cron(*words: str) -> str:
    """A command for cron's shell; a bare ``%`` would end the line."""
    return shlex.join(words).replace("%", "\\%")


def slug(text: str, limit: int = 30) -> str:
    """Returns text as a name that units, jobs and Kubernetes accept: small letters, digits, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:limit].strip("-") or "model"
