"""Parameters only where they are used: on other ranks they are meta tensors, which have a shape and no memory."""

from __future__ import annotations

import torch
from torch import nn


def give_up(module: nn.Module) -> int:
    """Frees a module's parameters and buffers on a rank that does not run it; returns the bytes that were freed.

    The parameters stay the same objects, so an optimizer that has them keeps them; without gradients it skips them.
    """
    freed = 0
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and not parameter.is_meta:
                freed += parameter.nbytes
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, empty)
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                freed += buffer.nbytes
                part._buffers[name] = torch.empty_like(buffer, device="meta")
    return freed


def is_given_up(module: nn.Module) -> bool:
    """Whether a module holds nothing on this rank."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
