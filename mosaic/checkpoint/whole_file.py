"""A model's weights as one plain safetensors file: written and read tensor by tensor, whatever rank has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.checkpoint.dtypes import bytes_of, entry_of, raw, tensor_from
from mosaic.checkpoint.model_tensors import ModelTensors
from mosaic.checkpoint.ranks import Ranks
from mosaic.checkpoint.safetensors_file import SUFFIX, Entry, Stored, in_order, replace_with_tensors, stored_in
from mosaic.errors import InvalidCheckpointError, MosaicError

INDEX = "model.safetensors.index.json"
"""Says which of several files has a tensor, as Hugging Face writes it."""


def export(model: nn.Module, path: Path, ranks: Ranks) -> None:
    """Writes the plain model's ``state_dict``, whole, on rank 0, which receives one tensor after the other.

    Tied weights are there under each of their names, so that ``load_state_dict`` finds all of its keys.

    Raises:
        MosaicError: The file cannot be written; nothing is left of it.
    """
    found, error = None, None
    try:
        found = ModelTensors.of(model)
        entries = [entry_of(name, found.tensors[first]) for name, first in found.names.items()]
    except Exception as failure:  # all ranks have to hear of it
        error = failure
    ranks.all_or_none(error)
    assert found is not None
    held = ranks.tell(sorted(found.here))
    source = {name: rank for rank in reversed(range(ranks.size)) for name in held[rank]}
    lost = [name for name in found.tensors if name not in source]
    if lost:
        raise MosaicError(f"no rank has {lost[0]} (and {len(lost) - 1} more); the model cannot be exported")
    fetch = _Fetch(found, source, ranks.rank, ranks.background_group())
    if ranks.rank == 0:
        error = _write(path, in_order(entries), fetch)
    else:
        for entry in in_order(entries):
            fetch.give(entry)
    ranks.all_or_none(error)


class _Fetch:
    """Brings tensors to rank 0, each when it is written; all ranks go through them in one order."""

    def __init__(self, found: ModelTensors, source: Mapping[str, int], rank: int, group: Any) -> None:
        self._found = found
        self._source = source
        self._rank = rank
        self._group = group
        self._room = torch.empty(0, dtype=torch.uint8)

    def give(self, entry: Entry) -> None:
        """Sends a tensor to rank 0, if it is this rank's to send."""
        first = self._found.names[entry.name]
        if self._source[first] == self._rank and entry.num_bytes:
            dist.send(raw(self._found.tensors[first]), dst=0, group=self._group)

    def take(self, entry: Entry) -> Any:
        """Returns the bytes of a tensor on rank 0; they are good until the next call."""
        first = self._found.names[entry.name]
        if self._source[first] == 0:
            return bytes_of(self._found.tensors[first])
        if self._room.numel() < entry.num_bytes:  # one for all: room that is freed is not always given back
            self._room = torch.empty(entry.num_bytes, dtype=torch.uint8)
        whole = self._room[: entry.num_bytes]
        if entry.num_bytes:
            dist.recv(whole, src=self._source[first], group=self._group)
        return bytes_of(whole)


def _write(path: Path, entries: list[Entry], fetch: _Fetch) -> MosaicError | None:
    """Writes the file; returns what went wrong. Even then it takes all tensors, since the other ranks send them."""
    left = iter(entries)

    def content(_: Entry) -> list[Any]:
        return [fetch.take(next(left))]

    try:
        replace_with_tensors(path, entries, content)
    except MosaicError as error:
        for entry in left:
            fetch.take(entry)
        return error
    return None


def load_weights(model: nn.Module, path: Path, ranks: Ranks) -> None:
    """Copies weights from a plain file, or a folder of such files, into the tensors that each rank has.

    Of tied weights one name is enough. Each rank opens the file; other dtypes are converted, as ``load_state_dict``
    does.

    Raises:
        InvalidCheckpointError: It is no such file, cut short, or of another model; says in what it differs.
    """
    found, stored, error = None, {}, None
    try:
        found = ModelTensors.of(model)
        stored = _stored(path)
        _check(path, stored, found)
    except Exception as failure:  # all ranks have to hear of it
        error = failure
    ranks.all_or_none(error)
    assert found is not None
    with torch.no_grad():
        for name, tensor in found.here.items():
            alias = next(each for each, first in found.names.items() if first == name and each in stored)
            tensor.copy_(_read(stored[alias]))
    ranks.all_or_none(None)


def _stored(path: Path) -> dict[str, Stored]:
    if not path.is_dir():
        return stored_in(path)
    index = path / INDEX
    if index.exists():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = sorted(each.name for each in path.glob(f"*{SUFFIX}"))
    if not files:
        raise InvalidCheckpointError(f"there is no {SUFFIX} file in {path}; give a file or folder that has one")
    return {name: stored for file in files for name, stored in stored_in(path / file).items()}


def _check(path: Path, stored: Mapping[str, Stored], model: ModelTensors) -> None:
    there = {model.names[name] for name in stored if name in model.names}
    differing = [f"{name} is only in the file" for name in stored if name not in model.names]
    differing += [f"{name} is only in the model" for name in model.tensors if name not in there]
    for name, found in stored.items():
        if name in model.names and found.entry.shape != tuple(model.tensors[model.names[name]].shape):
            shape = list(model.tensors[model.names[name]].shape)
            differing.append(f"{name} is {list(found.entry.shape)} in the file and {shape} in the model")
    if differing:
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise InvalidCheckpointError(
            f"{path} is of another model: {'; '.join(differing[:8])}{more}; build the model that it was made of"
        )


def _read(stored: Stored) -> torch.Tensor:
    content = bytearray()
    for piece in stored.pieces():
        content += piece
    return tensor_from(content, stored.entry)
