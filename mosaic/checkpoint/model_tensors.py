"""The tensors of a model by name: each once, though two parts may share it, and on ranks that do not have it, too."""

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
    """What a model's ``state_dict`` is made of."""

    tensors: dict[str, torch.Tensor]
    """The model's own tensors by their first name; on the meta device where this rank does not have them."""
    names: dict[str, str]
    """Every key of the ``state_dict``, and the first name of its tensor."""

    @staticmethod
    def of(model: nn.Module) -> ModelTensors:
        """Reads them off a model, without a copy.

        Raises:
            UnsupportedModelError: A key is no tensor of the model itself, so that nothing can be loaded into it.
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
        """The keys whose tensor has another name, too."""
        return {name: first for name, first in self.names.items() if name != first}

    @property
    def here(self) -> dict[str, torch.Tensor]:
        """Those that this rank has, cut from autograd."""
        return {name: tensor.detach() for name, tensor in self.tensors.items() if not tensor.is_meta}


def digest_of(model: nn.Module, ranks: Ranks) -> str:
    """Returns the SHA-256 over the names, dtypes, shapes and bytes of all parameters and buffers; all ranks call it.

    It is the same whatever the plan and the number of ranks; of a tensor that several have, the first one's counts.
    100 MB take 60 ms on a CPU that knows SHA (SHA-NI); from a GPU they are copied first.
    """
    found = ModelTensors.of(model)
    mine = {}
    for name, tensor in found.here.items():
        spec = TensorSpec.of(name, tensor)
        mine[name] = f"{spec.dtype} {list(spec.shape)} {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
    together: dict[str, str] = {}
    for told in reversed(ranks.all_gather(mine)):
        together.update(told)
    return hashlib.sha256(json.dumps(sorted(together.items())).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What a file and a model have in common, by the names of tensors, and in what they differ."""

    sources: dict[str, str]
    """For each tensor of the model that is in the file as the model has it, its name there."""
    new: tuple[str, ...]
    """Tensors that only the model has."""
    gone: tuple[str, ...]
    """Tensors that only the file has."""
    changed: dict[str, tuple[str, str]]
    """Tensors of another shape or dtype: what they are in the file, and in the model."""

    @staticmethod
    def of(model: ModelTensors, saved: Mapping[str, tuple[str, Sequence[int]]], *, aliases: bool) -> Overlap:
        """Compares.

        Args:
            model: The model.
            saved: Dtype and shape of each tensor of the file; an empty dtype where any will do.
            aliases: Whether a tied tensor of the model may be under any of its names.
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
        """Raises InvalidCheckpointError if a file is of another model; names the first few differences.

        Args:
            path: The file.
            kind: A word for it.
            partial: Whether it is enough that one tensor fits.
        """
        differing = [f"{name} is only in the {kind}" for name in self.gone]
        differing += [f"{name} is only in the model" for name in self.new]
        differing += [
            f"{name} is {saved} in the {kind} and {own} in the model" for name, (saved, own) in self.changed.items()
        ]
        if differing and not (partial and self.sources):
            more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
            way_out = "nothing of it fits" if partial else "build the model that was saved, or load with partial=True"
            raise InvalidCheckpointError(f"{path} is of another model: {'; '.join(differing[:8])}{more}; {way_out}")
