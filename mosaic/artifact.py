"""Mosaic's files: profiles, plans and records in JSON, rows in JSON lines; the provenance of results.

pydantic validates a file against its frozen dataclass. Files are written to a temporary file and renamed, so a full
disk or a killed process leaves either the old or the new file complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import pydantic_core
from annotated_types import Ge as Ge  # for fields: Annotated[int, Ge(1)]
from annotated_types import Le as Le
from pydantic import TypeAdapter, ValidationError

from mosaic.errors import InvalidFileError, MosaicError

T = TypeVar("T")
_adapter_of: Any = cache(TypeAdapter)


class StrictFile:
    """Base of dataclasses whose files reject unknown keys."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    @property
    def fingerprint(self) -> str:
        return fingerprint(self)


def to_json(value: object) -> str:
    """Returns a frozen dataclass as indented JSON; infinite numbers and NaN become null."""
    return pydantic_core.to_json(value, indent=2, inf_nan_mode="null").decode() + "\n"


def fingerprint(value: object) -> str:
    """Returns 16 hexadecimal digits that identify the content of a frozen dataclass."""
    return hashlib.sha256(pydantic_core.to_json(value, inf_nan_mode="null")).hexdigest()[:16]


def save(value: object, path: str | Path) -> None:
    """Writes a JSON file atomically; raises MosaicError on failure."""
    write_text(to_json(value), Path(path))


def write_text(text: str, path: Path) -> None:
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: Path) -> None:
    """Writes a file atomically, or raises MosaicError and keeps the old one; preserves links and pipes."""
    try:
        path = path.resolve() if path.is_symlink() else path
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            aside = Path(folder, path.name)
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
    except OSError as error:
        text = f"cannot write {path}: {error.strerror or error}; choose a folder that can be written, with room left"
        raise MosaicError(text) from error


def check_writable(path: Path) -> None:
    """Raises MosaicError unless a file at ``path``, or in a folder at ``path``, can be written."""
    place = path.parent if path.is_file() else path
    while not place.exists():
        place = place.parent
    if place.is_file() or not os.access(place, os.W_OK):
        raise MosaicError(f"cannot write {path}: {place} is not a folder that can be written; choose another")


def read(path: Path) -> bytes:
    """Reads a regular file; raises InvalidFileError for pipes and devices, which may be infinite."""
    try:
        if path.stat().st_size > 2**30 or not path.is_file():
            raise InvalidFileError(f"cannot read {path}: it is not a regular file of at most 1 GiB; name one")
        return path.read_bytes()
    except OSError as error:
        raise InvalidFileError(f"cannot read {path}: {error.strerror}") from error


def load(kind: type[T], path: Path) -> T:
    """Reads a frozen dataclass from ``path``; an InvalidFileError has the field and the violated rule."""
    return parse(kind, read(path), source=str(path))


def load_as(kind: type[T], value: T | str | Path | None) -> T | None:
    """Returns a plan or a profile; reads it if the value is a path."""
    if isinstance(value, str | Path):
        return load(kind, Path(value))
    if value is not None and not isinstance(value, kind):
        name, other = kind.__name__, type(value).__name__
        raise TypeError(f"{name.lower()}={value!r} is a {other}; pass a mosaic.{name} or its file's path")
    return value


def parse(kind: type[T], text: str | bytes, *, source: str) -> T:
    """Validates JSON ``text`` against the frozen dataclass ``kind``; see ``load``."""
    try:
        raw = pydantic_core.from_json(text)
    except ValueError as error:
        raise InvalidFileError(f"{source}: not valid JSON: {error}") from error
    schema = getattr(kind, "__dataclass_fields__", {}).get("schema_version")
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if schema is not None and version != schema.default:
        raise InvalidFileError(
            f"{source} has schema_version={version!r}, but a {kind.__name__} needs {schema.default}; "
            "create it again, or upgrade mosaic-colocate if it is newer"
        )
    try:
        value: T = _adapter_of(kind).validate_json(text, strict=True)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, each['loc'])) or 'the whole file'}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        ]
        more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        raise InvalidFileError(f"{source}: {'; '.join(lines[:3])}{more}") from error
    except MosaicError as error:  # raised by the dataclass
        raise type(error)(f"{source}: {error}") from error
    return value


def append_line(path: Path, row: Mapping[str, Any], *, flush: bool = False) -> None:
    """Appends a row, also after a truncated line. A killed process loses no rows; with ``flush``, nor does a crash."""
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        is_torn = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if is_torn else b"") + json.dumps(row).encode() + b"\n")
        if flush:
            file.flush()
            os.fsync(file.fileno())


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete rows; none without a file."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            if isinstance(row := json.loads(line), dict):
                yield row


def steps_in(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the last row of each ``step``; a step repeated after a kill has several rows."""
    return {row["step"]: row for row in lines_of(path) if isinstance(row.get("step"), int)}


def provenance() -> dict[str, Any]:
    """Returns the provenance of a result. Its command has no absolute folders, so it can be published."""
    return {
        "command": shlex.join(Path(word).name if Path(word).is_absolute() else word for word in sys.argv),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python_version": platform.python_version(),
    }


def commit() -> str:
    """Returns the commit of a clone, with ``+`` if files are changed; empty elsewhere."""
    top = Path(__file__).resolve().parent.parent
    describe = ["git", "-C", str(top), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.check_output(describe, text=True).strip() if (top / ".git").exists() else ""
    except (OSError, subprocess.CalledProcessError):
        return ""
