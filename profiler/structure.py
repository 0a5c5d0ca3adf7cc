"""A module's identity: a hash of its classes, settings, parameters and inputs finds its measurements again."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.profile import ModuleStructure
from mosaic.profiler.subject import Subject, tensors_in

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def structures_of(subjects: Sequence[Subject]) -> tuple[ModuleStructure, ...]:
    """Returns what modules are made of, for a profile and to compare one with."""
    return tuple(ModuleStructure(module=subject.name, digest=digest_of(subject.module)) for subject in subjects)


def digest_of(module: nn.Module) -> str:
    """Returns 16 hexadecimal digits that change with whatever decides a module's time.

    Those are the classes of all its parts with their settings (what they print, and plain attributes such as
    ``training``), the compiled methods of classes that are not torch's own, and shape, dtype and ``requires_grad`` of
    parameters and buffers. Not looked at are values of parameters, and functions and globals that a method uses.
    """
    return _hashed(_parts_of(module))


def inputs_of(subject: Subject) -> str:
    """Returns 16 hexadecimal digits that change with shapes, dtypes and plain values of a call, and with autocast."""
    return _hashed((*_leaves_of((subject.args, subject.kwargs)), *_ambient_of(subject)))


def _hashed(parts: Sequence[str] | Iterator[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _parts_of(module: nn.Module) -> Iterator[str]:
    seen: set[type] = set()
    for path, part in module.named_modules():
        kind = type(part)
        settings = sorted((name, value) for name, value in vars(part).items() if _is_setting(name, value))
        yield f"{path}: {kind.__module__}.{kind.__qualname__}({part.extra_repr()}) {settings!r}"
        for base in kind.__mro__:
            if base not in seen and base is not object and base.__module__.split(".")[0] != "torch":
                seen.add(base)
                yield from _code_of(base)
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{path}: {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"


def _is_setting(name: str, value: object) -> bool:
    """Whether an attribute is plain and of the module's author: a number of heads, a mode."""
    return not name.startswith("_") and isinstance(value, _PLAIN)


def _code_of(kind: type) -> Iterator[str]:
    """What the class's own methods do, without their place in a file."""
    for name, value in sorted(vars(kind).items()):
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, FunctionType):
            defaults = [repr(value) for value in function.__defaults__ or () if isinstance(value, _PLAIN)]
            yield f"{kind.__qualname__}.{name}: {defaults} {_written(function.__code__)}"


def _written(value: object) -> str:
    """Text of a compiled function or constant that is the same in every process."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {value.co_varnames} {[_written(v) for v in value.co_consts]}"
    if isinstance(value, frozenset):
        return str(sorted(map(repr, value)))  # its own order changes from process to process
    return repr(value)


def _leaves_of(value: Any) -> Iterator[str]:
    for tensor in tensors_in(value):
        yield f"{tuple(tensor.shape)} {tuple(tensor.stride())} {tensor.dtype} {tensor.requires_grad}"
    for leaf in pytree.tree_leaves(value):
        yield repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__


def _ambient_of(subject: Subject) -> Iterator[str]:
    """What a thread's settings do to every operator: gradients, autocast, and how products are rounded."""
    yield f"{torch.get_float32_matmul_precision()} {torch.are_deterministic_algorithms_enabled()}"
    if subject.settings is not None:
        with subject.settings():
            cast = [
                f"{kind} {torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}" for kind in ("cpu", "cuda")
            ]
            yield f"{torch.is_grad_enabled()} {' '.join(cast)}"
