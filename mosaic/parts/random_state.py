"""Random numbers of a chunk: those that its own layers draw, whatever the rest of the model draws beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

State = list[tuple[torch.device, torch.Tensor]]


def random_state(devices: Iterable[torch.device]) -> State:
    """Returns the states of the CPU's and the devices' generators."""
    found = [(torch.device("cpu"), torch.get_rng_state())]
    found += [(device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda"]
    return found


def set_random_state(state: State) -> None:
    """Puts generators back."""
    for device, value in state:
        if device.type == "cuda":
            torch.cuda.set_rng_state(value, device)
        else:
            torch.set_rng_state(value)


@contextmanager
def kept_random_state(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leaves generators as they were."""
    before = random_state(devices)
    try:
        yield
    finally:
        set_random_state(before)
