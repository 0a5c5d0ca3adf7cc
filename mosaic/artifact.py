"""Reading and writing the JSON files that Mosaic keeps: profiles, plans, run records; reading recipes in TOML.

A file is checked once, here, at the edge (by pydantic, against the frozen dataclass it becomes); inside the
library nothing is checked again. Writing needs the standard library only. A file is written aside and renamed, so a
full disk or a killed process leaves either the old file or the new one, never half of one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import tomllib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from mosaic.errors import InvalidFileError, MosaicError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ge:
    """A rule of a number in a file, ``Annotated[int, Ge(1)]``: at least this much."""

    limit: float

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        """Tells pydantic, which is loaded when a file is read and not before."""
        return {**handler(kind), "ge": self.limit}


@dataclass(frozen=True, slots=True)
class Le:
    """A rule of a number in a file: at most this much."""

    limit: float

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        """Tells pydantic."""
        return {**handler(kind), "le": self.limit}


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # costs 40 ms, and only files need it

    return TypeAdapter(kind)


def to_json(value: object) -> str:
    """Returns a frozen dataclass as indented JSON text; a number that is infinite or none becomes null."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n"


def fingerprint(value: object) -> str:
    """Returns 16 hexadecimal digits that name the content of a frozen dataclass."""
    text = json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it: objects, lists, words, numbers."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def save(value: object, path: Path) -> None:
    """Writes a frozen dataclass to ``path`` as JSON, whole or not at all.

    Raises:
        MosaicError: The folder cannot be written or the disk is full; names the file and the reason.
    """
    write_text(to_json(value), path)


def write_text(text: str, path: Path) -> None:
    """Writes text to ``path``, whole or not at all (see ``write_bytes``)."""
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: Path) -> None:
    """Writes ``content`` aside, flushes it to the disk, then renames it to ``path``.

    A link stays a link, to a new file; a device or a pipe is written to, and stays what it is.

    Raises:
        MosaicError: The folder cannot be made or written, or the disk is full. A file that was at ``path``
            before is left as it was.
    """
    aside: str | None = None
    try:
        path = path.resolve() if path.is_symlink() else path
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(aside).chmod(0o644)
        Path(aside).replace(path)
    except OSError as error:
        if aside is not None:
            Path(aside).unlink(missing_ok=True)
        raise MosaicError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that can be written, with room left"
        ) from error


def check_writable(path: Path) -> None:
    """Raises MosaicError unless a file at ``path``, or in the folder that is there, can be written; leaves nothing."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe
        return
    folder = path if path.is_dir() else path.parent
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MosaicError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that can be written, with room left"
        ) from error
    finally:
        for each in missing:
            with suppress(OSError):  # it was not made
                each.rmdir()


def load(kind: type[T], path: Path) -> T:
    """Reads ``path`` and checks it against the frozen dataclass ``kind``.

    Raises:
        InvalidFileError: The file is missing, empty, truncated, of a newer schema, or has a field that is
            missing, unknown, or of the wrong type or range. The message has the line and the reason.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InvalidFileError(f"cannot read {path}: {reason}") from error
    return parse(kind, text, source=str(path))


def parse(kind: type[T], text: str, *, source: str) -> T:
    """Checks JSON ``text`` against the frozen dataclass ``kind``; see ``load``."""
    from pydantic import ValidationError

    if not text.strip():
        raise InvalidFileError(f"{source} is empty; {_a(kind)} in JSON was expected")
    raw = _read_json(kind, text, source)
    _check_schema(kind, raw, source)
    try:
        erased: Any = kind
        value: T = _adapter(erased).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        location = [part for part in first["loc"] if isinstance(part, str | int)]
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InvalidFileError(
            f"{source}, line {_line_of(text, location)}: {'.'.join(map(str, location)) or 'the whole file'}: "
            f"{_said(first)}{more}"
        ) from error
    except MosaicError as error:  # a rule of the dataclass itself
        raise type(error)(f"{source}: {error}") from error
    return value


def _read_json(kind: Any, text: str, source: str) -> Any:
    if text.startswith("\ufeff"):
        raise InvalidFileError(f"{source} begins with a byte-order mark; save it as UTF-8 without one")
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError as error:
        raise InvalidFileError(f"{source}: lists in lists without end; this is not {_a(kind)}") from error
    except _GivenTwiceError as error:
        raise InvalidFileError(f"{source}: {error}; give each field once") from error
    except json.JSONDecodeError as error:
        at = f"{source}, line {error.lineno}"
        if error.msg == "Extra data":
            raise InvalidFileError(
                f"{at}: something follows the end of {_a(kind)}; keep one JSON value in the file"
            ) from error
        is_at_end = error.msg.startswith("Unterminated string") or re.fullmatch(r"\s*[\w.+-]*\s*", text[error.pos :])
        cause = "the file may have been cut short" if is_at_end else f"column {error.colno} is where reading stopped"
        raise InvalidFileError(f"{at}: not valid JSON ({error.msg}); {cause}") from error
    except ValueError as error:  # Python reads no number of thousands of digits
        found = re.search(rf"-?\d{{{sys.get_int_max_str_digits() + 1},}}", text)
        if found is None:
            raise InvalidFileError(f"{source}: {error}") from error
        line = text.count("\n", 0, found.start()) + 1
        raise InvalidFileError(
            f"{source}, line {line}: a number of {len(found[0].lstrip('-')):,} digits; no field takes more than 20"
        ) from error


def parse_toml(kind: type[T], text: str, *, source: str) -> T:
    """Checks TOML ``text`` against the frozen dataclass ``kind``, whose tables are dataclasses; see ``load``.

    Raises:
        InvalidFileError: It is no TOML, or a key is missing, unknown, or of the wrong type or range. The message has
            the line, the rule and the way out.
    """
    from pydantic import ValidationError

    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidFileError(f"{source}: not valid TOML: {error}") from error
    _check_keys(kind, raw, text, source, ())
    try:
        erased: Any = kind
        value: T = _adapter(erased).validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        location = tuple(part for part in first["loc"] if isinstance(part, str))
        line = _toml_line(text, location)
        raise InvalidFileError(f"{source}, line {line}: {'.'.join(location)}: {_said(first)}") from error
    except MosaicError as error:
        raise type(error)(f"{source}: {error}") from error
    return value


def _check_keys(kind: Any, raw: dict[str, Any], text: str, source: str, above: tuple[str, ...]) -> None:
    """Raises InvalidFileError for a key that a dataclass does not have; names those that it has."""
    known = {field.name: field for field in fields(kind)}
    types = get_type_hints(kind)
    for name, value in raw.items():
        where = (*above, name)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            line = _toml_line(text, where)
            raise InvalidFileError(f"{source}, line {line}: there is no key {'.'.join(where)!r}; {hint}")
        inner = next((part for part in (types[name], *get_args(types[name])) if is_dataclass(part)), None)
        if inner is not None and isinstance(value, dict):
            _check_keys(inner, value, text, source, where)


def _toml_line(text: str, location: tuple[str, ...]) -> int:
    """Finds the line of a key in TOML text, or of the last table above it that is there."""
    lines = text.splitlines()
    here: tuple[str, ...] = ()
    found = 1
    for number, line in enumerate(lines, start=1):
        if header := re.match(r"\s*\[\[?([^\]]+)\]", line):
            here = tuple(part.strip().strip("\"'") for part in header[1].split("."))
            if here == location[: len(here)]:
                found = number
        elif key := re.match(r"\s*([\w\"'.-]+)\s*=", line):
            whole = (*here, *(part.strip("\"'") for part in key[1].split(".")))
            if whole == location[: len(whole)]:
                found = number
                if whole == location:
                    return number
    return found


class _GivenTwiceError(ValueError):
    """An object has one name twice: JSON says nothing about which value counts."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise _GivenTwiceError(f"the field {twice!r} is there twice in one object")
    return found


def _a(kind: type[Any]) -> str:
    name = kind.__name__.lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _said(error: Any) -> str:
    """A rule's own words, where a rule of the dataclass was broken."""
    own = error.get("ctx", {}).get("error")
    return str(own) if isinstance(own, ValueError) else str(error["msg"])


def _check_schema(kind: type[Any], raw: object, source: str) -> None:
    known = getattr(kind, "SCHEMA_VERSION", None)
    if known is None:
        return
    if not isinstance(raw, dict):
        raise InvalidFileError(f"{source}, line 1: expected a JSON object, found {type(raw).__name__}")
    found = raw.get("schema_version")
    if isinstance(found, int) and found > known:
        raise InvalidFileError(
            f"{source}: schema_version={found} is newer than {known}, the newest that this Mosaic reads; "
            "upgrade mosaic-colocate, or make the file again"
        )
    if found != known:
        raise InvalidFileError(
            f"{source}: schema_version={found!r} is not {known}; this is not {_a(kind)} "
            "of this version of Mosaic: make the file again"
        )


def _line_of(text: str, location: list[str | int]) -> int:
    """Finds the line at which the value at ``location`` (keys and indices) starts."""
    decoder = json.JSONDecoder()
    position = _skip(text, 0)
    for part in location:
        found = _enter(text, position, part, decoder)
        if found is None:
            break
        position = found
    return text.count("\n", 0, position) + 1


def _skip(text: str, position: int, characters: str = " \t\r\n") -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _enter(text: str, position: int, part: str | int, decoder: json.JSONDecoder) -> int | None:
    """Returns where member ``part`` of the object or array at ``position`` starts, or None."""
    closing = {"{": "}", "[": "]"}.get(text[position])
    if closing is None:
        return None
    index = 0
    position = _skip(text, position + 1)
    while text[position] != closing:
        key: str | int = index
        if closing == "}":
            key, position = decoder.raw_decode(text, position)
            position = _skip(text, position, " \t\r\n:")
        if key == part:
            return position
        _, position = decoder.raw_decode(text, position)
        position = _skip(text, position, " \t\r\n,")
        index += 1
    return None
