"""Quoting of paths and words in each scheduler's language."""

from __future__ import annotations

import re
import shlex


def for_unit(text: str) -> str:
    """Quotes for a line of a systemd unit with paths, where ``%`` begins a specifier."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{quoted}"'


def for_exec(text: str) -> str:
    """Quotes for ``ExecStart=``, where ``$`` begins a variable too."""
    return for_unit(text).replace("$", "$$")


def for_cron(*words: str) -> str:
    """Quotes a command for cron's shell, where a bare ``%`` ends the line."""
    return shlex.join(words).replace("%", "\\%")


def slug(text: str, limit: int = 30) -> str:
    """Returns text as a name that units, jobs and Kubernetes accept: small letters, digits, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:limit].strip("-") or "model"
