"""The tensors of a model by name, each once, including those on other ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mosaic.checkpoint.ranks import Ranks
from mosaic.checkpoint.tensor_file import TensorSpec, bytes_of
from mosaic.errors import InvalidCheckpointError, UnsupportedModelError


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
        own = {id(tensor) for tensor in model.parameters()}
        own |= {id(tensor) for tensor in model.buffers()}
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
    100 MB take 60 ms on a CPU with SHA instructions (SHA-NI); tensors on a GPU are copied first.
    """
    own = ModelTensors.of(model)
    own_digests = {}
    for name, tensor in own.here.items():
        spec = TensorSpec.of(name, tensor)
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
            own = TensorSpec.of(name, model.tensors[names[name]])
            if tuple(shape) != own.shape or dtype not in ("", own.dtype):
                described = [f"{dtype} {list(shape)}", f"{dtype and own.dtype} {list(own.shape)}"]
                changed[name] = (described[0].strip(), described[1].strip())
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
