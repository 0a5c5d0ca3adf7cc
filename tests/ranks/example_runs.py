"""Examples that run on two ranks, and their packages, which the ranks alone load."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

HAS = {name: importlib.util.find_spec(name) is not None for name in ("transformers", "peft", "accelerate", "lightning")}
RUNS = (
    # Features of all ranks, kept of micro-batches; autocast, GradScaler, clipping.
    ("openclip.py", "--precision", "amp", "--accum-freq", "2"),
    ("huggingface.py", "--model", "audio", "--loop", "trainer"),
    ("lightning_loop.py", "--form", "trainer"),
)


def needs(run: Sequence[str]) -> list[str]:
    """Returns the packages that an example imports."""
    found = {"huggingface.py": ["transformers", "accelerate"], "lightning_loop.py": ["lightning"]}
    return {**found, "frozen.py": ["transformers", "peft"]}.get(run[0], [])
