"""States of the random generators of a process: torch's, Python's, NumPy's, and the loop's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mosaic.find import random_numbers


def random_state(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """Returns the states of this process's default generators, and of others by name."""
    state = random_numbers.random_state()
    (_, cpu), *gpus = state.torch
    numpy_kind, words, *rest = state.numpy
    return {
        "torch": cpu,
        "cuda": gpus[torch.cuda.current_device()][1] if gpus else None,
        "all_cuda": [gpu for _, gpu in gpus],
        "python": state.python,
        "numpy": [numpy_kind, [int(word) for word in words], *rest],
        "generators": {name: random_numbers.generator_state(each) for name, each in (generators or {}).items()},
    }


def set_random_state(state: Mapping[str, Any], generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Sets the generators to a state from ``random_state``; those without a saved name stay unchanged.

    With the same number of GPUs, each continues from its own state; otherwise the current one continues from the saved
    current one.
    """
    kind, words, *rest = state["numpy"]
    random_numbers.RandomState(
        torch=((torch.default_generator, state["torch"]),),
        python=state["python"],
        numpy=(kind, np.array(words, dtype=np.uint32), *rest),
    ).restore()
    if state["cuda"] is not None and torch.cuda.is_available():
        if len(all_cuda := state.get("all_cuda", [])) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(all_cuda)
        else:
            torch.cuda.set_rng_state(state["cuda"])
    saved = state.get("generators", {})
    for name, each in (generators or {}).items():
        if name in saved:
            each.set_state(saved[name])
