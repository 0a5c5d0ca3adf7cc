"""Copying many tensors out of static memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies, made by few kernels: a launch for each parameter would cost more than it copies."""
    made: list[torch.Tensor] = []
    grouped: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for tensor in tensors:
        if tensor.is_contiguous():
            made.append(torch.empty_like(tensor))
            grouped[tensor.dtype][0].append(made[-1])
            grouped[tensor.dtype][1].append(tensor)
        else:
            made.append(tensor.clone())
    for into, source in grouped.values():
        torch._foreach_copy_(into, source)
    return made
