"""What torch keeps for each thread and a lane therefore has to be told: gradient mode and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The calling thread's settings, part of what makes two calls the same call."""

    grad: bool
    """Whether autograd records."""
    autocast: bool
    """Whether CPU autocast is on."""
    autocast_dtype: torch.dtype | None
    """Its dtype; None while it is off."""
    autocast_cache: bool
    """Whether it keeps cast weights."""

    @staticmethod
    def capture() -> ThreadState:
        """Reads the settings of the calling thread."""
        autocast = torch.is_autocast_enabled("cpu")
        return ThreadState(
            grad=torch.is_grad_enabled(),
            autocast=autocast,
            autocast_dtype=torch.get_autocast_dtype("cpu") if autocast else None,
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the settings to the calling thread.

        Autocast is switched by its parts: leaving a nested ``torch.autocast`` would clear the cache of cast weights,
        which all threads share, under the feet of the other lanes.
        """
        before = ThreadState.capture()
        self._set()
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            before._set()

    def _set(self) -> None:
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_enabled("cpu", self.autocast)
        if self.autocast_dtype is not None:
            torch.set_autocast_dtype("cpu", self.autocast_dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)


def is_intercepted() -> bool:
    """Whether a mode of the caller (a profiler of operators, fake tensors, a tracer) watches this thread's operators.

    A lane's thread would escape it, so a call made under one runs where it was made.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch.is_inference_mode_enabled()
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )
