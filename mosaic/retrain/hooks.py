"""Commands that hear of a promotion: they may fail or hang without harm, and are tried again in the next run."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mosaic.artifact import load, save
from mosaic.errors import InvalidFileError
from mosaic.retrain.folder import Folder
from mosaic.retrain.recipe import Promote, seconds_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHook:
    """A command that has not ended well yet."""

    command: str
    """As the recipe has it."""
    version: str
    """The version that it is told of."""
    day: str
    """The day that promoted it."""
    tries: int = 0
    """How often it was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHooks:
    """``hooks.json``: what is to be run."""

    hooks: tuple[PendingHook, ...] = ()
    """In order."""


def remember(folder: Folder, promote: Promote, version: str, day: str) -> None:
    """Notes that the hooks are to be told of a version; called before the link is set, so none is forgotten."""
    there = pending(folder)
    new = tuple(PendingHook(command=command, version=version, day=day) for command in promote.hooks)
    known = {(hook.command, hook.version) for hook in there}
    save(PendingHooks(hooks=(*there, *(hook for hook in new if (hook.command, version) not in known))), folder.pending)


def run_pending(folder: Folder, promote: Promote, champion: str | None) -> tuple[str, ...]:
    """Runs what is to be run; returns a sentence for each that failed.

    A hook of a version that is no longer the champion is forgotten: its news is old.
    """
    left, said = [], []
    for hook in pending(folder):
        if hook.version != champion:
            continue
        failure = _run(folder, hook, seconds_of(promote.timeout, "timeout"))
        if failure is None:
            continue
        tried = replace(hook, tries=hook.tries + 1)
        if tried.tries < promote.tries:
            left.append(tried)
        again = "it is tried again in the next run" if tried.tries < promote.tries else "it is given up"
        said.append(f"hook {hook.command!r} for version {hook.version} {failure} (try {tried.tries}); {again}")
        _LOG.warning("%s", said[-1])
    if left or folder.pending.exists():
        save(PendingHooks(hooks=tuple(left)), folder.pending)
    return tuple(said)


def pending(folder: Folder) -> tuple[PendingHook, ...]:
    """Returns the hooks that have not ended well yet."""
    try:
        return load(PendingHooks, folder.pending).hooks
    except InvalidFileError:
        return ()


def _run(folder: Folder, hook: PendingHook, timeout_s: float) -> str | None:
    """Runs a command; returns how it failed, or None."""
    told = {
        "MOSAIC_VERSION": hook.version,
        "MOSAIC_VERSION_FOLDER": str((folder.versions / hook.version).resolve()),
        "MOSAIC_DAY_FOLDER": str(folder.day(hook.day).path.resolve()),
    }
    try:
        child = subprocess.Popen(
            hook.command, shell=True, cwd=folder.path, env={**os.environ, **told}, start_new_session=True
        )
    except OSError as error:
        return f"could not be started: {error.strerror or error}"
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"was ended after {timeout_s:g} s"
    return None if code == 0 else f"ended with {code}"


def names_of(hooks: tuple[str, ...]) -> Iterator[str]:
    """Yields the program of each command, for a check that it is there."""
    for command in hooks:
        yield command.split()[0]
