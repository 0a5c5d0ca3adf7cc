"""A model's weights as one plain safetensors file, from the ranks of a model or from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.checkpoint.folder import damage_of
from mosaic.checkpoint.manifest import MODEL, Manifest
from mosaic.checkpoint.model_tensors import ModelTensors, Overlap
from mosaic.checkpoint.ranks import Ranks
from mosaic.checkpoint.tensor_file import SUFFIX, TensorSpec, in_order, open_tensors, raw, replace_with_tensors
from mosaic.errors import InvalidCheckpointError, MosaicError

INDEX = "model.safetensors.index.json"
"""Hugging Face's index of tensors over several files."""


def export(model: nn.Module, path: Path, ranks: Ranks) -> None:
    """Writes the plain model's ``state_dict``, whole, on rank 0, which receives one tensor after the other.

    Tied weights appear under each of their names, as ``load_state_dict`` expects.

    Raises:
        MosaicError: The file cannot be written, and does not exist.
    """
    own, specs, error = None, [], None
    try:
        own = ModelTensors.of(model)
        specs = in_order(TensorSpec.of(name, own.tensors[first]) for name, first in own.names.items())
    except Exception as failure:  # of any kind: all ranks have to raise
        error = failure
    ranks.raise_if_any_failed(error)
    assert own is not None
    names_by_rank = ranks.all_gather(sorted(own.here))
    source = {name: rank for rank in reversed(range(ranks.size)) for name in names_by_rank[rank]}
    missing = [name for name in own.tensors if name not in source]
    if missing:
        raise MosaicError(f"no rank has {missing[0]} (and {len(missing) - 1} more); the model cannot be exported")
    carrier = _Carrier(own, source, ranks.rank, ranks.background_group())
    if ranks.rank == 0:
        error = _write(path, specs, carrier)
    else:
        for spec in specs:
            carrier.give(spec)
    ranks.raise_if_any_failed(error)


class _Carrier:
    """Transfers tensors to rank 0, each when it is written, in the same order on all ranks."""

    def __init__(self, model: ModelTensors, source: Mapping[str, int], rank: int, group: Any) -> None:
        self._model = model
        self._source = source
        self._rank = rank
        self._group = group
        self._room = torch.empty(0, dtype=torch.uint8)

    def give(self, spec: TensorSpec) -> None:
        """Sends a tensor to rank 0 if this rank is its source."""
        first = self._model.names[spec.name]
        if self._source[first] == self._rank and spec.num_bytes:
            dist.send(raw(self._model.tensors[first]), dst=0, group=self._group)

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """Returns a tensor, or its bytes, on rank 0; valid until the next call."""
        first = self._model.names[spec.name]
        if self._source[first] == 0:
            return self._model.tensors[first]
        if self._room.numel() < spec.num_bytes:  # reused: freed memory does not always return to the system
            self._room = torch.empty(spec.num_bytes, dtype=torch.uint8)
        whole = self._room[: spec.num_bytes]
        if spec.num_bytes:
            dist.recv(whole, src=self._source[first], group=self._group)
        return whole


def _write(path: Path, specs: list[TensorSpec], carrier: _Carrier) -> MosaicError | None:
    """Writes the file and returns the error; after an error, still receives all tensors that other ranks send."""
    left = iter(specs)
    try:
        replace_with_tensors(path, specs, lambda _: carrier.take(next(left)))
    except MosaicError as error:
        for spec in left:
            carrier.take(spec)
        return error
    return None


def extract_weights(checkpoint: Path, path: Path) -> int:
    """Writes the weights of a checkpoint from its files alone; returns the number of tensors.

    Args:
        checkpoint: The folder of one checkpoint.
        path: The file to write.

    Raises:
        InvalidCheckpointError: The checkpoint is damaged.
        MosaicError: The file cannot be written, and does not exist.
    """
    if damage := damage_of(checkpoint):
        raise InvalidCheckpointError(f"{'; '.join(damage)}; export an earlier checkpoint with --step")
    manifest = Manifest.read(checkpoint)
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    names = {name.removeprefix(MODEL): name for name in stored if name.startswith(MODEL)}
    names |= {name: f"{MODEL}{first}" for name, first in manifest.tied.items()}
    specs = [TensorSpec(name=name, dtype=stored[key].dtype, shape=stored[key].shape) for name, key in names.items()]
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(open_tensors(checkpoint / name)) for name in {t.file for t in stored.values()}
        }
        replace_with_tensors(path, specs, lambda name: files[stored[names[name]].file].get_tensor(names[name]))
    return len(specs)


def load_weights(model: nn.Module, path: Path, ranks: Ranks, *, partial: bool = False) -> Overlap:
    """Copies weights from a plain file, or a folder of such files, into the tensors that each rank has.

    One name of a tied weight is enough. Each rank opens the file; other dtypes are converted, as in
    ``load_state_dict``.

    Args:
        model: The model, of which this rank may have a part.
        path: The file or folder.
        ranks: The ranks that load together.
        partial: True to load the tensors that fit a different model.

    Returns:
        The loaded tensors and the differences.

    Raises:
        InvalidCheckpointError: It is not such a file, is truncated, or is of another model.
    """
    with ExitStack() as stack:
        own, overlap, stored, error = None, None, {}, None
        try:
            own = ModelTensors.of(model)
            stored = _opened(path, stack)
            shapes = {name: ("", file.get_slice(name).get_shape()) for name, file in stored.items()}
            overlap = Overlap.of(own, shapes, aliases=True)
            overlap.check(path, "file", partial=partial)
        except Exception as failure:  # of any kind: all ranks have to raise
            error = failure
        ranks.raise_if_any_failed(error)
        assert own is not None
        assert overlap is not None
        here = own.here
        with torch.no_grad():
            for name, source in overlap.sources.items():
                if name in here:
                    here[name].copy_(stored[source].get_tensor(source))
        ranks.raise_if_any_failed(None)
        return overlap


def _opened(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Returns the open file of each tensor, by the tensor's name."""
    files = [path]
    if path.is_dir():
        index = path / INDEX
        if index.exists():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [path / name for name in sorted(set(weight_map.values()))]
        else:
            files = sorted(path.glob(f"*{SUFFIX}"))
        if not files:
            raise InvalidCheckpointError(f"{path} has no {SUFFIX} file; pass a file or folder that has one")
    opened = [stack.enter_context(open_tensors(each)) for each in files]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # no dict
