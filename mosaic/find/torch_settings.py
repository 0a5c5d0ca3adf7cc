"""Settings of torch: one table of what reads and what changes each, and of what a lane has to do with it."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import _C
from torch.backends import mha

_READ = operator.attrgetter("read")
_DENORMAL = partial(operator.mul, sys.float_info.min, 0.5)


class Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    change: Callable[[Any], Any]
    scope: Literal["process", "call", "caller"] = "process"
    """The process's, which stays while lanes compute; a thread's, which goes with a call; or of no matter to lanes."""


def _autocast(device: str) -> tuple[Setting, Setting]:
    enabled = partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
    dtype = partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    return Setting(f"autocast on {device}", *enabled, "call"), Setting(f"autocast's dtype on {device}", *dtype, "call")


def _precision(of: str) -> Setting:
    read = partial(_C._get_fp32_precision_getter, *of.split())
    change = partial(_C._set_fp32_precision_setter, *of.split())
    return Setting(f"the precision of float32 ({of})", read, change, "caller" if of.endswith("all") else "process")


def _older(name: str, read: Callable[[], Any], change: Callable[[Any], Any]) -> Setting:
    def read_or_none() -> Any:
        try:
            return read()
        except RuntimeError:  # somebody has set its newer parts, which are read, too
            return None

    return Setting(name, read_or_none, lambda before: before is not None and change(before), "caller")


def _flag(name: str, setter: str | None = None) -> Setting:
    return Setting(name, getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{setter or name}"))


def _default_device() -> torch.device | None:
    return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


SETTINGS: tuple[Setting, ...] = (
    Setting("gradient mode", torch.is_grad_enabled, _C._set_grad_enabled, "call"),
    *_autocast("cpu"),
    *_autocast("cuda"),
    Setting("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, "call"),
    Setting("flushing of denormals", _DENORMAL, lambda before: torch.set_flush_denormal(before == 0.0), "call"),
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _older("the precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _older("TF32 in cuDNN", _C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),
    *map(_precision, ("generic all", "cuda all", "cuda matmul", "cuda conv", "cuda rnn")),
    *map(_precision, ("mkldnn all", "mkldnn matmul", "mkldnn conv", "mkldnn rnn")),
    *(_flag(f"{kind}_sdp_enabled", f"sdp_use_{kind}") for kind in ("flash", "mem_efficient", "math", "cudnn")),
    Setting("the fast path of attention", partial(getattr, mha, "_is_fastpath_enabled"), mha.set_fastpath_enabled),
    *map(_flag, ("mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")),
    Setting("the warnings' filters", lambda: id(warnings.filters), lambda before: None),
    Setting("the default device", _default_device, torch.set_default_device, "caller"),
    Setting("threads", torch.get_num_threads, torch.set_num_threads, "caller"),
    Setting("anomaly mode", _anomaly_mode, lambda before: torch.set_anomaly_enabled(*before), "caller"),
)
"""All of them; those that change others stand before these."""


def settings_of(scope: str) -> tuple[Setting, ...]:
    """Returns the settings of a scope that this torch reads; each call compares them several times."""
    has_cuda = torch.backends.cuda.is_built()
    return tuple(each for each in SETTINGS if each.scope == scope and (has_cuda or "cud" not in each.name))


def read(settings: Iterable[Setting]) -> tuple[Any, ...]:
    return tuple(map(operator.call, map(_READ, settings)))


def put_back(settings: Sequence[Setting], values: Sequence[Any]) -> None:
    for setting, before in zip(settings, values, strict=True):
        if setting.read() != before:
            setting.change(before)
