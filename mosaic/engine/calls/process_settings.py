"""Settings of torch that belong to the whole process: a lane cannot have its own, so they must not change under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READERS: dict[str, Callable[[], object]] = {
    "the default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch.get_deterministic_debug_mode,
    "the precision of float32 products": torch.get_float32_matmul_precision,
    "flash attention": torch._C._get_flash_sdp_enabled,
    "memory-efficient attention": torch._C._get_mem_efficient_sdp_enabled,
    "plain attention": torch._C._get_math_sdp_enabled,
    "cuDNN's attention": torch._C._get_cudnn_sdp_enabled,
    "the order of attention's kernels": lambda: tuple(torch._C._get_sdp_priority_order()),
    "the fast path of nn.MultiheadAttention": torch.backends.mha.get_fastpath_enabled,
    "oneDNN": torch._C._get_mkldnn_enabled,
}
"""Each setting's name, and what reads it."""

Settings = tuple[object, ...]


def read_settings() -> Settings:
    """Returns the value of each setting now."""
    return tuple(read() for read in _READERS.values())


def changed_setting(before: Settings, after: Settings) -> str | None:
    """Names the first setting that differs, or None."""
    if before == after:
        return None
    return next(name for name, old, new in zip(_READERS, before, after, strict=True) if old != new)


class SettingsWatch(TorchDispatchMode):
    """Notes whether a setting changes while a call runs, though it may be changed back before the end.

    Attributes:
        changed: The first such setting, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed: str | None = None
        self._before = read_settings()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged."""
        self.look()
        return func(*args, **(kwargs or {}))

    def look(self) -> None:
        """Compares the settings with those at the start."""
        self.changed = self.changed or changed_setting(self._before, read_settings())
