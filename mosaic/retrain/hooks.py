"""Commands that run after a promotion: they may fail or hang without harm, and the next run tries them again."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from dataclasses import dataclass, replace

from mosaic.artifact import save
from mosaic.retrain.folder import Folder, load_if_intact
from mosaic.retrain.recipe import Promote

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHook:
    """A command of the recipe that has not succeeded yet."""

    command: str
    version: str
    day: str
    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHooks:
    """``hooks.json``."""

    hooks: tuple[PendingHook, ...] = ()


def pending(folder: Folder) -> tuple[PendingHook, ...]:
    return (load_if_intact(PendingHooks, folder.pending) or PendingHooks()).hooks


def remember(folder: Folder, promote: Promote, version: str, day: str) -> None:
    """Adds the hooks of a version; call it before the link changes, so none is lost."""
    earlier = pending(folder)
    commands = {hook.command for hook in earlier if hook.version == version}
    new = (PendingHook(command=each, version=version, day=day) for each in promote.hooks if each not in commands)
    save(PendingHooks(hooks=(*earlier, *new)), folder.pending)


def run_pending(folder: Folder, promote: Promote, champion: str | None) -> tuple[str, ...]:
    """Runs the champion's pending hooks, and drops those of other versions; returns a sentence for each failure."""
    remaining, failures = [], []
    for hook in pending(folder):
        failure = _run(folder, hook, promote.timeout) if hook.version == champion else ""
        if not failure:
            continue
        tries = hook.tries + 1
        then = "it is given up" if tries >= promote.tries else "it is tried again in the next run"
        if tries < promote.tries:
            remaining.append(replace(hook, tries=tries))
        failures.append(f"hook {hook.command!r} for version {hook.version} {failure} (try {tries}); {then}")
        _LOG.warning("%s", failures[-1])
    if remaining or folder.pending.exists():
        save(PendingHooks(hooks=tuple(remaining)), folder.pending)
    return tuple(failures)


def _run(folder: Folder, hook: PendingHook, timeout_s: float) -> str:
    """Runs a command; describes its failure, or returns an empty text."""
    environment = {
        **os.environ,
        "MOSAIC_VERSION": hook.version,
        "MOSAIC_VERSION_FOLDER": str((folder.versions / hook.version).resolve()),
        "MOSAIC_DAY_FOLDER": str(folder.day(hook.day).path.resolve()),
    }
    try:
        child = subprocess.Popen(hook.command, shell=True, cwd=folder.path, env=environment, start_new_session=True)
    except OSError as error:
        return f"could not be started: {error.strerror or error}"
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"was ended after {timeout_s:g} s"
    return f"ended with {code}" if code else ""
