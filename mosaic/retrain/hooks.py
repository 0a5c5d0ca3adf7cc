"""Commands that run after a promotion: they may fail or hang without harm, and the next run tries them again."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from dataclasses import dataclass, replace

from mosaic.artifact import load, save
from mosaic.errors import InvalidFileError
from mosaic.retrain.folder import Folder
from mosaic.retrain.recipe import Promote

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHook:
    """A command that has not succeeded yet."""

    command: str
    """The command of the recipe."""
    version: str
    """The promoted version."""
    day: str
    """The day that promoted it."""
    tries: int = 0
    """Attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHooks:
    """``hooks.json``: the commands to run."""

    hooks: tuple[PendingHook, ...] = ()


def remember(folder: Folder, promote: Promote, version: str, day: str) -> None:
    """Adds the hooks of a version; call it before the link changes, so none is lost."""
    there = pending(folder)
    new = tuple(PendingHook(command=command, version=version, day=day) for command in promote.hooks)
    keys = {(hook.command, hook.version) for hook in there}
    save(
        PendingHooks(hooks=(*there, *(hook for hook in new if (hook.command, version) not in keys))),
        folder.pending,
    )


def run_pending(folder: Folder, promote: Promote, champion: str | None) -> tuple[str, ...]:
    """Runs the pending hooks; returns a sentence for each failure.

    Drops the hooks of a version that is no longer the champion.
    """
    remaining, failures = [], []
    for hook in pending(folder):
        if hook.version != champion:
            continue
        failure = _run(folder, hook, promote.timeout_s)
        if failure is None:
            continue
        attempt = replace(hook, tries=hook.tries + 1)
        if attempt.tries < promote.tries:
            remaining.append(attempt)
        again = "it is tried again in the next run" if attempt.tries < promote.tries else "it is given up"
        failures.append(f"hook {hook.command!r} for version {hook.version} {failure} (try {attempt.tries}); {again}")
        _LOG.warning("%s", failures[-1])
    if remaining or folder.pending.exists():
        save(PendingHooks(hooks=tuple(remaining)), folder.pending)
    return tuple(failures)


def pending(folder: Folder) -> tuple[PendingHook, ...]:
    try:
        return load(PendingHooks, folder.pending).hooks
    except InvalidFileError:
        return ()


def _run(folder: Folder, hook: PendingHook, timeout_s: float) -> str | None:
    """Runs a command; returns its failure, or None."""
    environment = {
        "MOSAIC_VERSION": hook.version,
        "MOSAIC_VERSION_FOLDER": str((folder.versions / hook.version).resolve()),
        "MOSAIC_DAY_FOLDER": str(folder.day(hook.day).path.resolve()),
    }
    try:
        child = subprocess.Popen(
            hook.command, shell=True, cwd=folder.path, env={**os.environ, **environment}, start_new_session=True
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
