"""Memory of a training step, counted in one forward on tensors without data.

A model is never made on a device to find out that it does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.cost.counting import CudaFunctions

PARAMETER_BYTES = 20
"""A parameter's value, gradient, AdamW's two moments, and the copy that measurements begin again from; 4 bytes each."""
GRAPH_PARAMETER_BYTES = 4
"""Gradients of a CUDA graph's own."""
POOLS = 2
"""Kept activations are there twice: of the plain step, and in the pool of a CUDA graph that takes turns with it."""
TEMPORARIES = 3
"""Temporaries at a step's peak, as multiples of the largest tensor that is kept: gradients of logits, and casts."""
FIXED_BYTES = 3 << 30
"""Context and libraries (about 1 GiB), and workspaces of cuBLAS: 32 MiB a stream and handle, two handles (forward's and
autograd's) on up to 32 streams."""
USABLE_SHARE = 0.9
"""Of the memory; the rest is lost to fragmentation."""


def needed_bytes(model: nn.Module, sample: Mapping[str, Any], *, batch: int) -> int:
    """Returns the bytes that training in bfloat16 takes, from a model and one sample on the meta device."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model = model.bfloat16()
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that no address is used again
        return tensor

    lowered = pytree.tree_map_only(torch.Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, sample)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), CudaFunctions():
        model(**lowered)
    sizes = [storage.nbytes() for storage in kept.values()]
    state = num_parameters * (PARAMETER_BYTES + GRAPH_PARAMETER_BYTES)
    casts = num_parameters * torch.bfloat16.itemsize
    return state + POOLS * (casts + batch * sum(sizes)) + TEMPORARIES * batch * max(sizes) + FIXED_BYTES


def usable_bytes(memory_bytes: int) -> int:
    """Returns the part of a device's memory that can be filled."""
    return int(USABLE_SHARE * memory_bytes)
