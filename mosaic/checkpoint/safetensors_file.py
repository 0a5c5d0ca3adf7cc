"""Writing and reading safetensors files tensor by tensor: no more of a file is in memory than is being moved.

The library's own writer takes all tensors of a file at once. The layout is its public one: eight bytes with the length
of the header, the header in JSON, the tensors' bytes without gaps. This file needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

from mosaic.checkpoint.disk import CHUNK_BYTES, flush_folder
from mosaic.errors import InvalidFileError, MosaicError

SUFFIX = ".safetensors"
LONGEST_HEADER_BYTES = 100_000_000
"""Longer headers are refused, as by the library."""
BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8},
}
"""Bits of an element, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor in a file."""

    name: str
    """Its key."""
    dtype: str
    """As in safetensors, such as ``F32``."""
    shape: tuple[int, ...]
    """Its size."""

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that was written."""

    num_bytes: int
    """Its length."""
    sha256: str
    """Checksum of its content."""


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Returns tensors in the order of a file: those of wide elements first, so that each is aligned."""
    return sorted(entries, key=lambda entry: (-BITS[entry.dtype], entry.name))


def write_tensors(path: Path, entries: Iterable[Entry], content: Callable[[Entry], Iterable[Any]]) -> Written:
    """Writes a new file and flushes it to the disk.

    Args:
        path: Where; nothing may be there.
        entries: What will be written, in the order of ``in_order``.
        content: Returns the bytes of a tensor, in pieces; called once for each, in this order.

    Raises:
        OSError: The disk is full, or the file is there.
    """
    ordered = in_order(entries)
    found = hashlib.sha256()
    length = 0

    def put(piece: Any) -> None:
        nonlocal length
        file.write(piece)
        found.update(piece)
        length += memoryview(piece).nbytes

    with path.open("xb") as file:
        put(_header(ordered))
        for entry in ordered:
            before = length
            for piece in content(entry):
                put(piece)
            assert length - before == entry.num_bytes, entry
        file.flush()
        os.fsync(file.fileno())
    return Written(num_bytes=length, sha256=found.hexdigest())


def replace_with_tensors(path: Path, entries: Iterable[Entry], content: Callable[[Entry], Iterable[Any]]) -> None:
    """Writes a file beside its place and renames it once it is on the disk; see ``write_tensors``.

    Raises:
        MosaicError: The folder cannot be written or the disk is full; a file that was there is as it was.
    """
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(aside, entries, content)
        aside.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # its folder may not be there
            aside.unlink(missing_ok=True)
        raise MosaicError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that can be written, with room left"
        ) from error


def _header(entries: Sequence[Entry]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        described[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a tensor is."""

    path: Path
    """The file."""
    start: int
    """First byte in it."""
    entry: Entry
    """What it is."""

    def pieces(self) -> Iterator[bytes]:
        """Reads its bytes."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            left = self.entry.num_bytes
            while left:
                piece = file.read(min(left, CHUNK_BYTES))
                if not piece:
                    raise InvalidFileError(f"{self.path} ends within {self.entry.name!r}; the file was cut short")
                left -= len(piece)
                yield piece


def stored_in(path: Path) -> dict[str, Stored]:
    """Reads which tensors a file holds.

    Raises:
        InvalidFileError: It is no such file, or cut short.
    """
    try:
        with path.open("rb") as file:
            header, start = _read_header(file)
            length = path.stat().st_size
        found = {}
        for name, described in header.items():
            if name == "__metadata__":
                continue
            entry = Entry(name=name, dtype=described["dtype"], shape=tuple(described["shape"]))
            first, end = described["data_offsets"]
            if not 0 <= first <= end or end - first != entry.num_bytes:
                raise ValueError(f"the place of {name!r} does not fit its shape")
            if start + end > length:
                raise ValueError(f"it ends within {name!r}")
            found[name] = Stored(path=path, start=start + first, entry=entry)
    except OSError as error:
        raise InvalidFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, struct.error) as error:  # of JSON, too
        raise InvalidFileError(f"{path} is no safetensors file, or was cut short: {error}") from error
    return found


def _read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > LONGEST_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise TypeError("its header is no JSON object")
    return header, 8 + length
