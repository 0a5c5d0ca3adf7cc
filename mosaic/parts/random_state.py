"""Random numbers of a chunk: those that its own layers draw, whatever the rest of the model draws beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

TorchState = tuple[torch.Tensor, tuple[torch.device, torch.Tensor] | None]
"""Of the CPU's generator, and of a GPU's."""
PythonState = tuple[Any, Any]
"""Of Python's generator and of numpy's, from which models of speech draw their masks."""
State = tuple[TorchState, PythonState]
"""Of all that a model may draw from."""


def random_state(device: torch.device) -> State:
    """Returns the states of all generators."""
    return torch_state(device), python_state()


def set_random_state(state: State) -> None:
    """Puts generators back."""
    set_torch_state(state[0])
    set_python_state(state[1])


def torch_state(device: torch.device) -> TorchState:
    """Returns the states of the CPU's and the device's generators; takes a twentieth of the time that all take."""
    own = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
    return torch.get_rng_state(), own


def set_torch_state(state: TorchState) -> None:
    """Puts torch's generators back."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1][1], state[1][0])


def python_state() -> PythonState:
    """Returns the states of Python's and numpy's generators."""
    return random.getstate(), np.random.get_state()


def set_python_state(state: PythonState) -> None:
    """Puts Python's and numpy's generators back."""
    random.setstate(state[0])
    np.random.set_state(state[1])


@contextmanager
def kept_torch_state(device: torch.device) -> Iterator[None]:
    """Leaves torch's generators as they were."""
    before = torch_state(device)
    try:
        yield
    finally:
        set_torch_state(before)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Leaves generators as they were."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before)


def is_same_state(one: State, other: State) -> bool:
    """Whether nothing was drawn between two states."""
    return is_same_torch_state(one[0], other[0]) and is_same_python_state(one[1], other[1])


def is_same_torch_state(one: TorchState, other: TorchState) -> bool:
    """Whether nothing was drawn of the CPU's and the device's generators between two states."""
    (cpu, own), (its_cpu, its_own) = one, other
    is_same_gpu = own is None or its_own is None or torch.equal(own[1], its_own[1])
    return is_same_gpu and torch.equal(cpu, its_cpu)


def is_same_python_state(one: PythonState, other: PythonState) -> bool:
    """Whether nothing was drawn of Python's and numpy's numbers between two states."""
    (name, words, *rest), (its_name, its_words, *its_rest) = one[1], other[1]
    return one[0] == other[0] and (name, rest) == (its_name, its_rest) and np.array_equal(words, its_words)
