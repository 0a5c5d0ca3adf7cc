"""The weights of a checkpoint as one plain file, made of its files alone: neither the model nor torch is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mosaic.checkpoint.folder import damage_of
from mosaic.checkpoint.manifest import MODEL, Manifest
from mosaic.checkpoint.safetensors_file import Stored, replace_with_tensors, stored_in
from mosaic.errors import InvalidCheckpointError


def extract_weights(checkpoint: Path, path: Path) -> int:
    """Writes the plain model's ``state_dict`` as one safetensors file; returns how many tensors it has.

    Args:
        checkpoint: The folder of one checkpoint.
        path: The file to write.

    Raises:
        InvalidCheckpointError: The checkpoint is damaged; says in what.
        MosaicError: The file cannot be written; nothing is left of it.
    """
    damage = damage_of(checkpoint)
    if damage:
        raise InvalidCheckpointError(f"{'; '.join(damage)}; export an earlier checkpoint with --step")
    manifest = Manifest.read(checkpoint)
    found: dict[str, Stored] = {}
    for name in {tensor.file for tensor in manifest.tensors}:
        found.update(stored_in(checkpoint / name))
    weights = {name.removeprefix(MODEL): stored for name, stored in found.items() if name.startswith(MODEL)}
    weights.update({name: weights[first] for name, first in manifest.tied.items()})
    entries = [replace(stored.entry, name=name) for name, stored in weights.items()]
    replace_with_tensors(path, entries, lambda entry: weights[entry.name].pieces())
    return len(entries)
