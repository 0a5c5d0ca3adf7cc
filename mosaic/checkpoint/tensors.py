"""Tensors by name, of a model and of a safetensors file.

The library reads files. Its writer needs all tensors of a file at once, and an export of a large model has one at a
time, so this module has its own: eight bytes with the length of the header, the header in JSON, the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from mosaic.checkpoint.folder import TensorEntry, flush_folder, write_error
from mosaic.checkpoint.ranks import Ranks
from mosaic.errors import InvalidCheckpointError, InvalidFileError, UnsupportedModelError

SUFFIX = ".safetensors"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def describe(name: str, tensor: torch.Tensor) -> TensorEntry:
    """Describes a tensor; a meta tensor stands for one on another rank.

    Raises:
        TypeError: It is sharded, quantized, sparse or of a dtype that safetensors does not support.
    """
    is_whole = tensor.is_meta or type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    if not is_whole or tensor.layout != torch.strided:
        raise TypeError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, and only whole tensors are saved; leave "
            "sharding of modules to Mosaic's plan, or save this model with torch.distributed.checkpoint"
        )
    if tensor.dtype not in _NAMES:
        raise TypeError(f"{name} is of dtype {tensor.dtype}, which safetensors does not support; cast it")
    return TensorEntry(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a safetensors name."""
    return _DTYPES[name]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as a flat CPU tensor, without a copy if it is contiguous there."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor for a file."""
    return memoryview(raw(tensor).numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12


def in_order(specs: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Returns tensors in the order of a file: wide elements first, for alignment."""
    return sorted(specs, key=lambda spec: (-spec.item_bytes, spec.name))


def write_tensors(path: Path, specs: Iterable[TensorEntry], tensor: Callable[[str], torch.Tensor]) -> tuple[int, str]:
    """Writes a new file, flushes it to the disk, and returns its length and SHA-256.

    Args:
        path: A new path.
        specs: The tensors; they are written in the order of ``in_order``.
        tensor: Returns a tensor by its name; called once for each, in this order.

    Raises:
        OSError: The disk is full, or the file exists.
    """
    ordered, described, length = in_order(specs), {}, 0
    for spec in ordered:
        offsets = [length, length := length + spec.num_bytes]
        described[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps({"__metadata__": {"format": "pt"}, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    digest = hashlib.sha256(header)
    with path.open("xb") as file:
        file.write(header)
        for spec in ordered:
            content = bytes_of(tensor(spec.name))
            assert content.nbytes == spec.num_bytes, spec
            file.write(content)
            digest.update(content)
        file.flush()
        os.fsync(file.fileno())
    return len(header) + length, digest.hexdigest()


def replace_with_tensors(path: Path, specs: Iterable[TensorEntry], tensor: Callable[[str], torch.Tensor]) -> None:
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
        raise write_error(path, error) from error


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """The tensors in a model's ``state_dict``."""

    tensors: dict[str, torch.Tensor]
    """The model's own tensors by their first name; on the meta device where this rank does not have them."""
    names: dict[str, str]
    """Every key of the ``state_dict``, and the first name of its tensor."""

    @staticmethod
    def of(model: nn.Module) -> ModelTensors:
        """Reads the tensors of a model, without a copy.

        Raises:
            UnsupportedModelError: A key of the ``state_dict`` is not a parameter or buffer of the model.
        """
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        first: dict[int, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        names: dict[str, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in own:
                raise UnsupportedModelError(
                    f"state_dict() has {name!r}, a {type(tensor).__name__} that is neither a parameter nor a buffer of "
                    "the model (a hook or get_extra_state made it); keep it in a buffer, or in extra={...}"
                )
            names[name] = first.setdefault(id(tensor), name)
            tensors.setdefault(names[name], tensor)
        return ModelTensors(tensors=tensors, names=names)

    @property
    def tied(self) -> dict[str, str]:
        """Other keys of tied tensors, and their first names."""
        return {name: first for name, first in self.names.items() if name != first}

    @property
    def here(self) -> dict[str, torch.Tensor]:
        """The tensors on this rank, detached from autograd."""
        return {name: tensor.detach() for name, tensor in self.tensors.items() if not tensor.is_meta}


def digest_of(model: nn.Module, ranks: Ranks) -> str:
    """Returns the SHA-256 over the names, dtypes, shapes and bytes of all parameters and buffers; all ranks call it.

    It is the same under any plan and number of ranks; the first rank that has a tensor provides its bytes.
    """
    own_digests = {}
    for name, tensor in ModelTensors.of(model).here.items():
        spec = describe(name, tensor)
        own_digests[name] = f"{spec.dtype} {list(spec.shape)} {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
    digests: dict[str, str] = {}
    for rank_digests in reversed(ranks.all_gather(own_digests)):
        digests.update(rank_digests)
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The tensors that a file and a model share, and their differences."""

    sources: dict[str, str]
    """For each tensor of the model that the file has in the same form, its name there."""
    new: tuple[str, ...]
    """Tensors that only the model has."""
    gone: tuple[str, ...]
    """Tensors that only the file has."""
    changed: dict[str, tuple[str, str]]
    """Shape and dtype of differing tensors, in the file and in the model."""

    @staticmethod
    def of(model: ModelTensors, saved: Mapping[str, tuple[str, Sequence[int]]], *, aliases: bool) -> Overlap:
        """Compares a model with a file.

        Args:
            model: The model.
            saved: Dtype and shape of each tensor of the file; an empty dtype fits any.
            aliases: True if the file may have a tied tensor under any of its names.
        """
        names = model.names if aliases else {name: name for name in model.tensors}
        sources, changed = {}, {}
        for name in sorted(saved.keys() & names.keys()):
            dtype, shape = saved[name]
            own = describe(name, model.tensors[names[name]])
            if tuple(shape) != own.shape or dtype not in ("", own.dtype):
                descriptions = f"{dtype} {list(shape)}", f"{dtype and own.dtype} {list(own.shape)}"
                changed[name] = (descriptions[0].strip(), descriptions[1].strip())
            elif name == names[name] or names[name] not in sources:
                sources[names[name]] = name
        there = sources.keys() | {names[name] for name in changed}
        return Overlap(
            sources=sources,
            new=tuple(name for name in sorted(model.tensors) if name not in there),
            gone=tuple(sorted(saved.keys() - names.keys())),
            changed=changed,
        )

    def check(self, path: Path, kind: str, *, partial: bool) -> None:
        """Raises InvalidCheckpointError, with the first few differences, if a file is of another model.

        Args:
            path: The file.
            kind: A word for it.
            partial: True if one fitting tensor is enough.
        """
        differing = [f"{name} is only in the {kind}" for name in self.gone]
        differing += [f"{name} is only in the model" for name in self.new]
        differing += [
            f"{name} is {saved} in the {kind} and {own} in the model" for name, (saved, own) in self.changed.items()
        ]
        if differing and not (partial and self.sources):
            more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
            remedy = "no tensor fits" if partial else "build the model that was saved, or load with partial=True"
            raise InvalidCheckpointError(f"{path} is of another model: {'; '.join(differing[:8])}{more}; {remedy}")
