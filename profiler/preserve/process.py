"""What belongs to the process or the thread: random numbers, and settings of torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

_Setting = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def _attribute(holder: Any, name: str) -> _Setting:
    return name, partial(getattr, holder, name), partial(setattr, holder, name)


def _autocast(device: str) -> tuple[_Setting, ...]:
    return (
        (
            f"autocast on {device}",
            *(partial(f, device) for f in (torch.is_autocast_enabled, torch.set_autocast_enabled)),
        ),
        (
            f"autocast's dtype on {device}",
            *(partial(f, device) for f in (torch.get_autocast_dtype, torch.set_autocast_dtype)),
        ),
    )  # type: ignore[return-value]


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


_CUDA = torch.backends.cuda

SETTINGS: tuple[_Setting, ...] = (
    ("gradient mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    *_autocast("cpu"),
    *_autocast("cuda"),
    ("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("default device", _default_device, torch.set_default_device),
    ("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    ("precision of products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("threads", torch.get_num_threads, torch.set_num_threads),
    (
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda before: torch.set_anomaly_enabled(*before),
    ),
    ("flash attention", _CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    ("memory-efficient attention", _CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    ("plain attention", _CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    ("cuDNN's attention", _CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    _attribute(_CUDA.matmul, "allow_tf32"),
    _attribute(_CUDA.matmul, "allow_fp16_reduced_precision_reduction"),
    _attribute(_CUDA.matmul, "allow_bf16_reduced_precision_reduction"),
    _attribute(torch.backends.mkldnn, "enabled"),
)
"""Each by its name, with what reads it and what sets it."""


class Process:
    """Random numbers and settings as they are now."""

    def __init__(self) -> None:
        self._random: list[tuple[Callable[[Any], Any], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
            (np.random.set_state, np.random.get_state(legacy=False)),
        ]
        if torch.cuda.is_initialized():
            for gpu in range(torch.cuda.device_count()):
                self._random.append((partial(torch.cuda.set_rng_state, device=gpu), torch.cuda.get_rng_state(gpu)))
        self._settings = [(name, read, change, read()) for name, read, change in SETTINGS]

    def put_back(self) -> Iterator[str]:
        """Puts all of it back, and says what each that could not be was."""
        steps: list[tuple[str, Callable[[], Any]]] = [
            *(("random numbers", partial(change, state)) for change, state in self._random),
            *((name, partial(_put_back, read, change, before)) for name, read, change, before in self._settings),
            ("autocast's cache", torch.clear_autocast_cache),  # it may hold weights as they were inside
        ]
        for name, step in steps:
            try:
                step()
            except Exception as error:  # the rest must be put back all the same
                yield f"{name}: {error}"


def _put_back(read: Callable[[], Any], change: Callable[[Any], Any], before: Any) -> None:
    if read() != before:
        change(before)
