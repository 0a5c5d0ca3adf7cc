"""Random numbers of a chunk: those that its own layers draw, whatever the rest of the model draws beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

State = tuple[torch.Tensor, tuple[torch.device, torch.Tensor] | None]
"""Of the CPU's generator, and of a GPU's."""


def random_state(device: torch.device) -> State:
    """Returns the states of the CPU's and the device's generators."""
    own = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
    return torch.get_rng_state(), own


def set_random_state(state: State) -> None:
    """Puts generators back."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1][1], state[1][0])


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Leaves generators as they were."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before)
