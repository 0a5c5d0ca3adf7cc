"""The device of a process's cases: the CPU, unless ``on`` sets another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

_current = [torch.device("cpu")]


def device() -> torch.device:
    return _current[0]


@contextmanager
def on(chosen: torch.device) -> Iterator[None]:
    """Sets the device of models and batches, for all threads."""
    before, _current[0] = _current[0], chosen
    try:
        yield
    finally:
        _current[0] = before


def moved(values: Any) -> Any:
    """Returns nested values with their tensors on the device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device()), values)
