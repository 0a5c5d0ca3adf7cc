"""Leaving a model as it was found: tracing and profiling run it, and training must not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Gives gradients, buffers and the random numbers of the process back as they were, also after an error.

    Gradients are out of the way inside: ``grad`` is None for every parameter.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    random_state = torch.get_rng_state()
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
