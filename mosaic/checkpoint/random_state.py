"""States of the random generators of a process: torch's, Python's, NumPy's, and the loop's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """Returns the states of this process's default generators, and of others by name."""
    numpy_kind, words, *rest = np.random.get_state()
    uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if uses_cuda else None,
        "all_cuda": torch.cuda.get_rng_state_all() if uses_cuda else [],
        "python": random.getstate(),
        "numpy": [numpy_kind, [int(word) for word in np.asarray(words)], *rest],
        "generators": {name: each.get_state() for name, each in (generators or {}).items()},
    }


def set_random_state(state: Mapping[str, Any], generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Brings the generators into a state that ``random_state`` returned; those of no name in it stay as they are.

    Where there are as many GPUs as there were, each goes on; otherwise the current one goes on as the one that was
    current.
    """
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        if len(all_cuda := state.get("all_cuda", [])) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(all_cuda)
        else:
            torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
    saved = state.get("generators", {})
    for name, each in (generators or {}).items():
        if name in saved:
            each.set_state(saved[name])
