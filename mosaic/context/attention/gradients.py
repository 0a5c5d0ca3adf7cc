"""Sum of the gradients of parameters that every context rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Any = None) -> None:
    """Adds the gradients of all ranks of a group, in place; a gradient that no rank has stays None.

    A rank without a gradient, such as one without an image, adds zeros: all ranks call this with the same parameters.

    Args:
        parameters: In the same order on every rank; frozen ones are skipped.
        group: Process group of the context ranks; None: the default one.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    alike: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in trained:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for (dtype, device), same_kind in alike.items():
        has = torch.tensor([parameter.grad is not None for parameter in same_kind], dtype=dtype, device=device)
        flat = torch.cat([_of(parameter).reshape(-1) for parameter in same_kind] + [has])
        dist.all_reduce(flat, group=group)
        numbers = flat.split([*(parameter.numel() for parameter in same_kind), len(same_kind)])
        for parameter, summed, count in zip(same_kind, numbers, numbers[-1].tolist(), strict=False):
            parameter.grad = summed.view_as(parameter).clone() if count else None


def _of(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
