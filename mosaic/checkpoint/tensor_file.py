"""Safetensors files, written and read tensor by tensor to save memory.

The library reads them. Its writer needs all tensors of a file at once, so this module has its own. The layout is
public: eight bytes with the length of the header, the header in JSON, the tensors' bytes without gaps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mosaic.checkpoint.disk import flush_folder, is_full
from mosaic.errors import InvalidFileError, MosaicError, NoRoomError

SUFFIX = ".safetensors"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Description of a tensor in a file."""

    name: str
    """Its key."""
    dtype: str
    """As in safetensors, such as ``F32``."""
    shape: tuple[int, ...]
    """Its size."""

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> TensorSpec:
        """Describes a tensor; a meta tensor stands for one on another rank.

        Raises:
            TypeError: It is sharded, quantized, sparse or of a dtype that safetensors does not support.
        """
        is_whole = tensor.is_meta or type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not is_whole or tensor.layout != torch.strided:
            raise TypeError(
                f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, and only whole tensors are saved; "
                "leave sharding of modules to Mosaic's plan, or save this model with torch.distributed.checkpoint"
            )
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is of dtype {tensor.dtype}, which safetensors does not support; cast it")
        return TensorSpec(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a safetensors name."""
    return _DTYPES[name]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as a flat CPU tensor, without a copy if it is contiguous there."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor for a file."""
    return memoryview(raw(tensor).numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12


def in_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Returns tensors in the order of a file: wide elements first, for alignment."""
    return sorted(specs, key=lambda spec: (-_DTYPES[spec.dtype].itemsize, spec.name))


def write_tensors(path: Path, specs: Iterable[TensorSpec], tensor: Callable[[str], torch.Tensor]) -> tuple[int, str]:
    """Writes a new file, flushes it to the disk, and returns its length and SHA-256.

    Args:
        path: A new path.
        specs: The tensors; they are written in the order of ``in_order``.
        tensor: Returns a tensor by its name; called once for each, in this order.

    Raises:
        OSError: The disk is full, or the file exists.
    """
    ordered = in_order(specs)
    header = _header(ordered)
    digest, length = hashlib.sha256(header), len(header)
    with path.open("xb") as file:
        file.write(header)
        for spec in ordered:
            content = bytes_of(tensor(spec.name))
            assert content.nbytes == spec.num_bytes, spec
            file.write(content)
            digest.update(content)
            length += content.nbytes
        file.flush()
        os.fsync(file.fileno())
    return length, digest.hexdigest()


def replace_with_tensors(path: Path, specs: Iterable[TensorSpec], tensor: Callable[[str], torch.Tensor]) -> None:
    """Writes a file beside its place and renames it once it is on the disk; see ``write_tensors``.

    Raises:
        MosaicError: The folder cannot be written or the disk is full; an existing file is unchanged.
    """
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(aside, specs, tensor)
        aside.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # its folder may be missing
            aside.unlink(missing_ok=True)
        raise (NoRoomError if is_full(error) else MosaicError)(
            f"cannot write {path}: {error.strerror or error}; choose a folder that can be written, with room left"
        ) from error


def _header(specs: Sequence[TensorSpec]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        end = start + spec.num_bytes
        described[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def open_tensors(path: Path) -> Any:
    """Opens a file with the library's ``safe_open``, for a ``with`` block.

    Raises:
        InvalidFileError: It cannot be read, is not such a file, or was cut short.
    """
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise InvalidFileError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise InvalidFileError(f"{path} is not a safetensors file, or was cut short: {error}") from error
