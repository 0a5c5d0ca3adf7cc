"""Tensors by name, of a model and of safetensors files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from mosaic.checkpoint import folder as run_folder
from mosaic.checkpoint.folder import MODEL, FileEntry, Manifest, TensorEntry
from mosaic.errors import InvalidCheckpointError, InvalidFileError, UnsupportedModelError

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
"""Hugging Face's index of tensors over several files."""
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}
"""By their names in safetensors."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(name: str, tensor: torch.Tensor) -> TensorEntry:
    """Describes a tensor, or refuses it; a meta tensor stands for one on another rank."""
    is_whole = tensor.is_meta or type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    if not is_whole or tensor.layout != torch.strided:
        raise TypeError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, and only whole tensors are saved; leave "
            "sharding of modules to Mosaic's plan, or save this model with torch.distributed.checkpoint"
        )
    if tensor.dtype not in _NAMES:
        raise TypeError(f"{name} is of dtype {tensor.dtype}, which safetensors does not support; cast it")
    return TensorEntry(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    plain = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return memoryview(plain.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Writes a file of contiguous CPU tensors that share no memory, and flushes it; OSError if it cannot."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"(?:os error|code:) (\d+)", str(error))  # the only sign of a full disk
        raise (OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))) from error
    path.chmod(0o644)  # the library makes the file private
    return run_folder.flushed(path)


def open_tensors(path: Path) -> Any:
    """Opens a file with the library's ``safe_open``, for a ``with`` block."""
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise InvalidFileError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise InvalidFileError(f"{path} is not a safetensors file, or was cut short: {error}") from error


def open_weights(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Opens a plain file, or the files of a folder; returns the open file of each tensor, by the tensor's name."""
    paths = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if (path / INDEX).exists():
        try:
            weight_map = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
            paths = [path / name for name in sorted(set(weight_map.values()))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InvalidFileError(f"{path / INDEX} is not an index of weights: {error!r}; save them again") from error
    if not paths:
        raise InvalidCheckpointError(f"{path} has no {SUFFIX} file; pass a file or folder that has one")
    files = [stack.enter_context(open_tensors(each)) for each in paths]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118  # no dict


class StoredTensors:
    """The tensors of a checkpoint by their names there; each may be a view of its file, which ``stack`` closes."""

    def __init__(self, checkpoint: Path, stack: ExitStack) -> None:
        manifest = Manifest.read(checkpoint)
        self.tied = manifest.tied
        self.entries = {tensor.name: tensor for tensor in manifest.tensors}
        names = {tensor.file for tensor in manifest.tensors}
        self._files = {name: stack.enter_context(open_tensors(checkpoint / name)) for name in names}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self.entries[name].file].get_tensor(name)
        return tensor

    def of_module(self, prefix: str) -> dict[str, TensorEntry]:
        """Returns the tensors of the model or a companion by every key of its ``state_dict``."""
        entries = {name.removeprefix(prefix): each for name, each in self.entries.items() if name.startswith(prefix)}
        return entries | {name: entries[first] for name, first in self.tied.items() if prefix == MODEL}


def extract_weights(checkpoint: Path, path: Path) -> int:
    """Writes the weights of an intact checkpoint as one plain file, atomically; returns the number of tensors."""
    path = path.resolve()  # a link stays a link
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stored = StoredTensors(checkpoint, stack)
            weights = {name: stored[entry.name] for name, entry in stored.of_module(MODEL).items()}
            write_tensors(aside, weights | {name: weights[name].clone() for name in stored.tied})
        aside.replace(path)
        run_folder.flush_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the folder may be missing
            aside.unlink(missing_ok=True)
        raise run_folder.write_error(path, error) from error
    return len(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """The tensors in a model's ``state_dict``."""

    tensors: dict[str, torch.Tensor]
    """The model's own tensors by their first name; on the meta device where this rank does not have them."""
    names: dict[str, str]
    """Every key of the ``state_dict``, and the first name of its tensor."""

    @staticmethod
    def of(model: nn.Module) -> ModelTensors:
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        first, state = dict[int, str](), model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            if id(tensor) not in own:
                raise UnsupportedModelError(
                    f"state_dict() has {name!r}, a {type(tensor).__name__} that is neither a parameter nor a buffer of "
                    "the model (a hook or get_extra_state made it); keep it in a buffer, or in extra={...}"
                )
            first.setdefault(id(tensor), name)
        names = {name: first[id(tensor)] for name, tensor in state.items()}
        return ModelTensors(tensors={name: state[name] for name in first.values()}, names=names)

    @property
    def tied(self) -> dict[str, str]:
        """Other keys of tied tensors, and their first names."""
        return {name: first for name, first in self.names.items() if name != first}

    @property
    def here(self) -> dict[str, torch.Tensor]:
        """The tensors on this rank, detached from autograd."""
        return {name: tensor.detach() for name, tensor in self.tensors.items() if not tensor.is_meta}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The tensors that a file and a model share, and their differences."""

    sources: dict[str, str]
    """For each tensor of the model that the file has in the same form, its name there."""
    new: tuple[str, ...]
    """Only in the model."""
    gone: tuple[str, ...]
    """Only in the file."""
    changed: dict[str, tuple[str, str]]
    """Shape and dtype of differing tensors, in the file and in the model."""

    @staticmethod
    def of(model: ModelTensors, saved: Mapping[str, tuple[str, Sequence[int]]]) -> Overlap:
        """Compares a model with a file's dtypes and shapes; an empty dtype fits any, and one name of a tied weight."""
        sources, changed = {}, {}
        for name in sorted(saved.keys() & model.names.keys()):
            (dtype, shape), first = saved[name], model.names[name]
            own = describe(name, model.tensors[first])
            if tuple(shape) != own.shape or dtype not in ("", own.dtype):
                changed[name] = f"{dtype} {list(shape)}".strip(), f"{dtype and own.dtype} {list(own.shape)}".strip()
            elif name == first or first not in sources:
                sources[first] = name
        there = sources.keys() | {model.names[name] for name in changed}
        new = tuple(name for name in sorted(model.tensors) if name not in there)
        return Overlap(sources=sources, new=new, gone=tuple(sorted(saved.keys() - model.names.keys())), changed=changed)

    def check(self, path: Path, *, partial: bool = False) -> None:
        """Refuses the file of another model by its differences; with ``partial``, one without a fitting tensor."""
        differing = [f"{name} is only in the file" for name in self.gone]
        differing += [f"{name} is only in the model" for name in self.new]
        differing += [f"{key} is {old} in the file and {own} in the model" for key, (old, own) in self.changed.items()]
        if differing and not (partial and self.sources):
            more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
            remedy = "no tensor fits" if partial else "build the model that was saved, or load its exported weights"
            raise InvalidCheckpointError(f"{path} is of another model: {'; '.join(differing[:8])}{more}; {remedy}")
