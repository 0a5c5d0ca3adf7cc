"""Leaving a model as it was found: tracing and profiling run it, and training must not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Gives gradients, buffers and the random numbers of the process back as they were, also after an error.

    The random numbers are the CPU's and those of every GPU on which the model has something.

    Gradients are out of the way inside: ``grad`` is None for every parameter.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in model.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    random_state = torch.get_rng_state()
    gpus = sorted(
        {tensor.device for tensor in (*parameters, *model.buffers()) if tensor.device.type == "cuda"}, key=str
    )
    gpu_states = [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        for gpu, state in zip(gpus, gpu_states, strict=True):
            torch.cuda.set_rng_state(state, gpu)
        with torch.no_grad():
            for part, name, buffer, before in buffers:
                part._buffers[name] = buffer  # a forward may have put another one there
                buffer.copy_(before)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
