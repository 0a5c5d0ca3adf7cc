"""A model's weights as one plain safetensors file, from the ranks of a model or from a checkpoint."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.checkpoint.folder import MODEL, Manifest, TensorEntry, damage_of
from mosaic.checkpoint.ranks import Ranks, run_on_all
from mosaic.checkpoint.tensors import (
    SUFFIX,
    ModelTensors,
    Overlap,
    describe,
    in_order,
    open_tensors,
    raw,
    replace_with_tensors,
)
from mosaic.errors import InvalidCheckpointError, MosaicError

INDEX = "model.safetensors.index.json"
"""Hugging Face's index of tensors over several files."""


def export(model: nn.Module, path: Path, ranks: Ranks) -> None:
    """Writes the plain model's ``state_dict``, whole, on rank 0, which receives one tensor after the other.

    Tied weights appear under each of their names, as ``load_state_dict`` expects.

    Raises:
        MosaicError: The file cannot be written, and does not exist.
    """
    own = run_on_all(ranks, lambda: ModelTensors.of(model))
    names = own.names.items()
    entries = run_on_all(ranks, lambda: in_order(describe(name, own.tensors[first]) for name, first in names))
    names_by_rank = ranks.all_gather(sorted(own.here))
    source = {name: rank for rank in reversed(range(ranks.size)) for name in names_by_rank[rank]}
    if missing := [name for name in own.tensors if name not in source]:
        raise MosaicError(f"no rank has {missing[0]} (and {len(missing) - 1} more); the model cannot be exported")
    group = ranks.background_group()
    memory = torch.empty(0, dtype=torch.uint8)  # reused: freed memory does not always return to the system
    remaining = iter(entries)

    def next_tensor(entry: TensorEntry) -> torch.Tensor:
        """Sends the tensor to rank 0, which receives its bytes; valid until the next call."""
        nonlocal memory
        tensor, owner = own.tensors[own.names[entry.name]], source[own.names[entry.name]]
        if owner == ranks.rank:
            if ranks.rank and entry.num_bytes:
                dist.send(raw(tensor), dst=0, group=group)
            return tensor
        if ranks.rank == 0 and entry.num_bytes:
            if memory.numel() < entry.num_bytes:
                memory = torch.empty(entry.num_bytes, dtype=torch.uint8)
            dist.recv(memory[: entry.num_bytes], src=owner, group=group)
        return memory[: entry.num_bytes]

    def write() -> None:
        try:
            if ranks.rank == 0:
                replace_with_tensors(path, entries, lambda _: next_tensor(next(remaining)))
        finally:  # on the other ranks all; on rank 0 those behind an error, which are sent all the same
            for entry in remaining:
                next_tensor(entry)

    run_on_all(ranks, write)


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
    entries = [replace(stored[key], name=name) for name, key in names.items()]
    with ExitStack() as stack:
        files = {name: stack.enter_context(open_tensors(checkpoint / name)) for name in {t.file for t in entries}}
        replace_with_tensors(path, entries, lambda name: files[stored[names[name]].file].get_tensor(names[name]))
    return len(entries)


def load_weights(model: nn.Module, path: Path, ranks: Ranks, *, partial: bool = False) -> Overlap:
    """Copies weights from a plain file, or a folder of such files, into the tensors that each rank has.

    One name of a tied weight is enough. Each rank opens the file; other dtypes are converted, as in
    ``load_state_dict``. See ``Checkpointer.load_weights``.
    """
    with ExitStack() as stack:

        def compare() -> tuple[dict[str, torch.Tensor], Overlap, dict[str, Any]]:
            own, stored = ModelTensors.of(model), _open_all(path, stack)
            shapes = {name: ("", file.get_slice(name).get_shape()) for name, file in stored.items()}
            overlap = Overlap.of(own, shapes, aliases=True)
            overlap.check(path, "file", partial=partial)
            return own.here, overlap, stored

        here, overlap, stored = run_on_all(ranks, compare)
        for name, source in overlap.sources.items():
            if name in here:
                here[name].copy_(stored[source].get_tensor(source))
        ranks.raise_if_any_failed(None)
        return overlap


def _open_all(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Returns the open file of each tensor, by the tensor's name."""
    paths = [path]
    if path.is_dir():
        paths = sorted(path.glob(f"*{SUFFIX}"))
        if (path / INDEX).exists():
            weight_map = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
            paths = [path / name for name in sorted(set(weight_map.values()))]
        if not paths:
            raise InvalidCheckpointError(f"{path} has no {SUFFIX} file; pass a file or folder that has one")
    files = [stack.enter_context(open_tensors(each)) for each in paths]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118  # no dict
