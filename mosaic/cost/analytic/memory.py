"""What a module keeps from step to step: parameters, gradients, and the optimizer's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from mosaic.cost.counts import MemoryCounts

Optimizer = Literal["none", "sgd", "momentum", "adam", "adamw"]

_STATES = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Values that an optimizer keeps for each that it trains."""


def count_memory(
    module: nn.Module, run: MemoryCounts, *, training: bool, optimizer: Optimizer, master_weights: bool
) -> MemoryCounts:
    """Returns what was counted of a run with what stays added to it.

    torch's optimizers keep their state in the parameter's dtype; with ``master_weights`` a parameter in 16 bits has a
    float32 copy, and states in float32.

    Raises:
        ValueError: There is no optimizer of that name.
    """
    if optimizer not in _STATES:
        raise ValueError(f"optimizer={optimizer!r} is not known; use one of {', '.join(_STATES)}")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad] if training else []
    state = 0
    for parameter in trained:
        narrow = master_weights and parameter.element_size() < 4
        width = 4 if narrow else parameter.element_size()
        state += parameter.numel() * (width * _STATES[optimizer] + (4 if narrow and optimizer != "none" else 0))
    return dataclasses.replace(
        run,
        parameter_bytes=_total(module.parameters()),
        buffer_bytes=_total(module.buffers()),
        gradient_bytes=_total(trained),
        optimizer_bytes=state,
    )


def _total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
