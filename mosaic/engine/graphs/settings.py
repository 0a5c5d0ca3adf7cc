"""Settings of torch that decide which kernels a capture has; a replay keeps those that it was captured under."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_GETTERS: tuple[Callable[[], Any], ...] = (
    torch.is_grad_enabled,
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.get_float32_matmul_precision,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    *(
        getattr(torch._C, name)
        for name in (
            "_get_sdp_priority_order",
            "_get_math_sdp_allow_fp16_bf16_reduction",
            "_get_deterministic_fill_uninitialized_memory",
            "_get_cudnn_enabled",
            "_get_cudnn_benchmark",
            "_get_cudnn_deterministic",
            "_get_cudnn_allow_tf32",
            "_get_cublas_allow_tf32",
            "_get_cublas_allow_fp16_accumulation",
            "_get_cublas_allow_fp16_reduced_precision_reduction",
            "_get_cublas_allow_bf16_reduced_precision_reduction",
            "_get_blas_preferred_backend",
            "_get_linalg_preferred_backend",
        )
        if hasattr(torch._C, name)
    ),
)


def torch_settings(device: str) -> Hashable:
    """Returns what must be equal for a replay to run the kernels that an eager call would, on a type of device."""
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    made_on = tuple(str(mode.device) for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext))
    return (autocast, made_on, *(_value(getter) for getter in _GETTERS))


def has_other_mode() -> bool:
    """Whether torch functions go through a mode of the user's, other than a default device, which sees no replay."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def _value(getter: Callable[[], Any]) -> Hashable:
    try:
        found = getter()
    except RuntimeError as error:  # torch's answer where its old and new settings of precision were mixed
        return str(error)
    return tuple(found) if isinstance(found, list) else found  # type: ignore[no-any-return]
