"""Versions of the model, and the two links to the version in force and the approved version.

The links are the only truth. A link is replaced atomically, so a reader sees the old version or the new one. It
resolves the link once and reads all files from the version's folder, which never changes.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mosaic.artifact import lines_of, load, save
from mosaic.checkpoint.folder import flush_folder, sha256_of
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.retrain.folder import DayState, Folder, replay_dates
from mosaic.retrain.recipe import Recipe

Link = Literal["champion", "anchor"]
"""``champion``: in force; ``anchor``: approved by a person."""
WEIGHTS = "model.safetensors"
_NAME = re.compile(r"\d{4,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """``card.json``: the origin of a version."""

    schema_version: int = 1
    version: str
    day: str
    created: str
    parent: str | None
    """Version that the training started from; None for new weights."""
    step: int
    sha256: str
    code: str
    """SHA-256 of the file with its model's code."""
    mosaic: str
    torch: str
    values: dict[str, float]
    """Mean value on each set of the gate."""


@dataclass(frozen=True, slots=True)
class Version:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def weights(self) -> Path:
        """Weights, a safetensors file with the keys of the plain model."""
        return self.path / WEIGHTS

    @property
    def card(self) -> Card:
        return load(Card, self.path / "card.json")


def champion(folder: str | Path) -> Version:
    """Returns the version in force; the link is resolved once, so all its files belong together.

    Raises:
        MosaicError: No version is in force yet, or its weights are damaged or gone.
    """
    name = linked(Folder(Path(folder)), "champion")
    if name is None:
        raise MosaicError(f"{folder} has no champion yet: no day was promoted; see `mosaic retrain status {folder}`")
    return find(Folder(Path(folder).resolve()), name)


def linked(folder: Folder, link: Link) -> str | None:
    """Returns the name of the version that a link points to; None without a link."""
    path = folder.path / link
    if not path.is_symlink():
        if path.exists():
            raise MosaicError(
                f"{path} is not a link, as after a copy that follows links; remove it, and point to a version by "
                f"`mosaic retrain promote {folder.path} VERSION`"
            )
        return None
    return Path(os.readlink(path)).name  # noqa: PTH115  # the target's name, which may be gone


def point(folder: Folder, link: Link, version: str) -> None:
    """Points a link to a version, atomically and durably; raises MosaicError if it does not exist."""
    target = find(folder, version)
    aside = folder.path / f".{link}-{secrets.token_hex(4)}"
    aside.symlink_to(Path("versions") / target.name)
    aside.replace(folder.path / link)
    flush_folder(folder.path)
    for temporary in folder.path.glob(f".{link}-????????"):  # of runs that were killed
        temporary.unlink()


def promote(folder: Folder, version: str, *, by: str, day: str | None = None) -> None:
    """Makes a version the champion; writes the history first, so a rollback always knows the previous one."""
    before = linked(folder, "champion")
    if before != version:
        folder.note("promoted", champion=version, before=before, by=by, day=day)
        point(folder, "champion", version)


def is_overruled(folder: Folder, version: str) -> bool:
    """Returns True if, by the history, a person changed the champion after a version's promotion."""
    promoted = False
    for row in lines_of(folder.history):
        promoted |= row.get("champion") == version and row.get("by") == "gate"
        if promoted and row.get("champion") is not None and row.get("by") == "a person":
            return True
    return False


def previous(folder: Folder) -> str | None:
    """Returns the version in force before the champion, by the history; None for none."""
    existing, now = {version.name for version in all_versions(folder)}, linked(folder, "champion")
    before = [row.get("before") for row in lines_of(folder.history) if now in existing and row.get("champion") == now]
    return before[-1] if before and before[-1] in existing else None


def find(folder: Folder, version: str) -> Version:
    """Returns a version by its name, with or without leading zeros.

    Raises:
        MosaicError: It does not exist, or its weights are damaged or gone.
    """
    existing = all_versions(folder)
    for candidate in existing:
        if candidate.name.lstrip("0") == version.lstrip("0"):
            weights = candidate.weights
            if not weights.is_file() or sha256_of(weights) != candidate.card.sha256:
                raise InvalidFileError(f"{weights} is gone, or has other bytes than when {candidate.name} was made")
            return candidate
    names = ", ".join(candidate.name for candidate in existing[-8:]) or "none yet"
    raise MosaicError(f"there is no version {version!r} in {folder.versions}; there are {names}")


def all_versions(folder: Folder) -> tuple[Version, ...]:
    """Returns the complete versions, the oldest first."""
    return tuple(Version(path) for path in sorted(folder.versions.glob("*")) if _NAME.fullmatch(path.name))


def first_state(folder: Folder, recipe: Recipe, new: tuple[str, ...], version: str, began: str = "") -> DayState:
    """Returns the state of a day that begins on new data, from the version in force."""
    champion = linked(folder, "champion")
    return DayState(
        day=max(new),
        new=new,
        replay=tuple(date for date in replay_dates(folder, recipe) if date not in new),
        parent=champion,
        champion=champion,
        anchor=linked(folder, "anchor"),
        version=version,
        began=began,
    )


def next_name(folder: Folder) -> str:
    return f"{max((int(version.name) for version in all_versions(folder)), default=0) + 1:04d}"


def add(folder: Folder, card: Card, weights: Path, program: Path) -> None:
    """Adds a version of a day's weights and its model's code, unless it exists."""
    final = folder.versions / card.version
    if final.is_dir():
        return
    aside = folder.versions / f".making-{card.version}-{secrets.token_hex(4)}"
    try:
        aside.mkdir(parents=True)
        for path, name in ((weights, WEIGHTS), (program, program.name)):
            shutil.copyfile(path, aside / name)
            flush_folder(aside / name)
        save(card, aside / "card.json")
        flush_folder(aside)
        aside.rename(final)
        flush_folder(folder.versions)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise MosaicError(
            f"cannot make version {card.version}: {error.strerror or error}; make room in {folder.versions}"
        ) from error
    for unfinished in folder.versions.glob(".making-*"):  # of runs that were killed
        shutil.rmtree(unfinished, ignore_errors=True)


def drop_old(folder: Folder, keep: int) -> None:
    """Removes all but the newest versions, and checkpoints of days before the last.

    Linked versions and the target of a rollback stay, with their days.
    """
    in_use = {linked(folder, "champion"), linked(folder, "anchor"), previous(folder)}
    for version in all_versions(folder)[:-keep]:
        if version.name not in in_use:
            aside = version.path.with_name(f".making-{version.name}-dropped")
            version.path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    for day in folder.days()[:-1]:
        if day.state.is_over and day.state.version not in in_use:
            day.drop_weights()
