"""The GPU of a rank, and a check that its model is there."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from mosaic.errors import BackendUnavailableError


def own_gpu(environ: Mapping[str, str] = os.environ, *, num_visible: int | None = None) -> int:
    """Returns the number of this rank's GPU: ``LOCAL_RANK``, or 0 where the launcher lets it see that one alone.

    Raises:
        BackendUnavailableError: There are several, and not as many as ranks.
    """
    visible = torch.cuda.device_count() if num_visible is None else num_visible
    rank = int(environ.get("LOCAL_RANK", "0"))
    if rank < visible:
        return rank
    if visible == 1:
        return 0
    raise BackendUnavailableError(
        f"there is no GPU for local rank {rank}; start as many ranks as there are GPUs",
        found=f"{visible} GPUs",
        needed=f"{rank + 1} or more",
    )


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first of a model's tensors that is on a GPU; the CPU where none is."""
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def gpu_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def check_place(model: nn.Module, device: torch.device) -> None:
    """Raises BackendUnavailableError, naming a parameter, unless all of a model's parameters are on a rank's device.

    Buffers may be in host memory, such as counters.
    """
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise BackendUnavailableError(
                f"parameter {name!r} is on {parameter.device} and this rank runs on {device}; move the model to "
                f"{device} on this rank, before its optimizer is made",
                found=str(parameter.device),
                needed=str(device),
            )
