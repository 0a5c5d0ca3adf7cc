"""Settings of torch: one table of what reads and what changes each, and of what a lane has to do with it."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import _C
from torch.backends import mha

Scope: TypeAlias = Literal["process", "call", "caller"]

# These are read several times in each call, so without functions in Python.
_HAS_CUDA = torch.backends.cuda.is_built()
_OF_CUDA: Scope = "process" if _HAS_CUDA else "caller"
_READ = operator.attrgetter("read")
_DENORMAL = partial(operator.mul, sys.float_info.min, 0.5)
_FAST_PATH = partial(getattr, mha, "_is_fastpath_enabled")


class Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    change: Callable[[Any], Any]
    scope: Scope = "process"
    """The process's, which stays while lanes compute; a thread's, which goes with a call; or of no matter to lanes."""


def _autocast(device: str, scope: Scope) -> tuple[Setting, Setting]:
    enabled = partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
    dtype = partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    return Setting(f"autocast on {device}", *enabled, scope), Setting(f"autocast's dtype on {device}", *dtype, scope)


def _precision(of: str, scope: Scope) -> Setting:
    read = partial(_C._get_fp32_precision_getter, *of.split())
    change = partial(_C._set_fp32_precision_setter, *of.split())
    return Setting(f"the precision of float32 ({of})", read, change, scope)


def _older(name: str, read: Callable[[], Any], change: Callable[[Any], Any]) -> Setting:
    def read_or_none() -> Any:
        try:
            return read()
        except RuntimeError:  # somebody has set its newer parts, which always count
            return None

    return Setting(name, read_or_none, lambda before: before is not None and change(before), "caller")


def _flag(name: str, setter: str | None = None, scope: Scope = "process") -> Setting:
    return Setting(name, getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{setter or name}"), scope)


def _only_warn(before: bool) -> None:
    torch.use_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=before)


def _default_device() -> torch.device | None:
    return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


SETTINGS: tuple[Setting, ...] = (
    Setting("gradient mode", torch.is_grad_enabled, _C._set_grad_enabled, "call"),
    *_autocast("cpu", "call"),
    *_autocast("cuda", "call" if _HAS_CUDA else "caller"),
    Setting("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, "call"),
    Setting("flushing of denormals", _DENORMAL, lambda before: torch.set_flush_denormal(before == 0.0), "call"),
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("deterministic algorithms", _C._get_deterministic_algorithms, torch.use_deterministic_algorithms),
    Setting("warnings instead of errors for them", _C._get_deterministic_algorithms_warn_only, _only_warn),
    _older("the precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _older("TF32 in cuDNN", _C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),
    *(_precision(of, "caller") for of in ("generic all", "cuda all", "mkldnn all")),  # seen in what they set
    *(_precision(f"cuda {of}", _OF_CUDA) for of in ("matmul", "conv", "rnn")),
    *(_precision(f"mkldnn {of}", "process") for of in ("matmul", "conv", "rnn")),
    *(_flag(f"{kind}_sdp_enabled", f"sdp_use_{kind}") for kind in ("flash", "mem_efficient", "math")),
    _flag("cudnn_sdp_enabled", "sdp_use_cudnn", _OF_CUDA),
    Setting("nn.MultiheadAttention's fast path", _FAST_PATH, mha.set_fastpath_enabled),
    _flag("mkldnn_enabled"),
    *(_flag(f"cudnn_{name}", scope=_OF_CUDA) for name in ("enabled", "benchmark", "deterministic")),
    Setting("the warnings' filters", lambda: id(warnings.filters), lambda before: None),
    Setting("the default device", _default_device, torch.set_default_device, "caller"),
    Setting("threads", torch.get_num_threads, torch.set_num_threads, "caller"),
    Setting("anomaly mode", _anomaly_mode, lambda before: torch.set_anomaly_enabled(*before), "caller"),
)
"""All of them; those that change others stand before these."""


def settings_of(scope: str) -> tuple[Setting, ...]:
    return tuple(setting for setting in SETTINGS if setting.scope == scope)


def read(settings: Iterable[Setting]) -> tuple[Any, ...]:
    return tuple(map(operator.call, map(_READ, settings)))


def put_back(settings: Sequence[Setting], values: Sequence[Any]) -> None:
    for setting, before in zip(settings, values, strict=True):
        if setting.read() != before:
            setting.change(before)
