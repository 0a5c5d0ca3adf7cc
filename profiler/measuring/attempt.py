"""Running a module that may fail: the failure becomes a reason, and what it held is let go."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MAX_CHARACTERS = 300
OUT_OF_MEMORY = "out of memory"


class Attempt:
    """How it went.

    Attributes:
        reason: What was raised, in one line; None where nothing was.
    """

    reason: str | None = None


@contextmanager
def attempt() -> Iterator[Attempt]:
    """Keeps what the block raises as a reason; interrupts go on as errors."""
    made = Attempt()
    is_memory = False
    try:
        yield made
    except Exception as error:
        made.reason = reason_of(error)
        is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if is_memory:  # whoever called this still holds the error, and it the tensors of the frames that it passed
            traceback.clear_frames(error.__traceback__)
    if is_memory:
        gc.collect()
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def reason_of(error: Exception) -> str:
    """Returns an error in one line, its kind first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = OUT_OF_MEMORY if isinstance(error, (torch.OutOfMemoryError, MemoryError)) else type(error).__name__
    return f"{kind}: {lines[0][:_MAX_CHARACTERS]}" if lines else kind
