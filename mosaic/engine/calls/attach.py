"""Taking a module's calls by swapping its class, as FSDP2 does: keys, isinstance and references stay what they were."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch._C._dynamo import eval_frame as dynamo

from mosaic.engine.calls.thread_state import is_exported, on_lane

Interceptor = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Attached:
    """First base of a swapped class, before the plain one; the instance itself holds nothing of Mosaic."""

    _mosaic_plain: ClassVar[type[nn.Module]]
    _mosaic_owner: ClassVar[int]
    _mosaic_intercept: ClassVar[Interceptor]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hides the swapped class from a hook of the user's base."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        plain = super().__call__  # type: ignore[misc]
        if id(self) != kind._mosaic_owner or is_exported():  # or a copy made by hand through type(module)
            return plain(*args, **kwargs)
        return kind._mosaic_intercept(plain, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies as the plain class, so that a copy runs its own weights in the plain way."""
        kind = type(self)
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        arguments = tuple(kind._mosaic_plain if item is kind else item for item in reduced[1])
        return (reduced[0], arguments, *reduced[2:])


def _class_now(module: nn.Module) -> Any:
    """Returns the class that code sees as ``__class__``: ``super(self.__class__, self)`` calls a base."""
    kind = type(module)
    return vars(kind).get("_mosaic_plain", kind)


def _set_class(module: nn.Module, kind: type) -> None:
    """Gives an attached module another plain class, as ``torch.nn.utils.parametrize`` does."""
    before = type(module)
    _CLASS.__set__(module, kind)
    if "_mosaic_plain" in vars(before):
        attach(module, before._mosaic_intercept, before._mosaic_reach)  # type: ignore[attr-defined]


_CLASS: Any = object.__dict__["__class__"]


_SKIP = dynamo._FrameAction.SKIP  # a model that is compiled after it was colocated runs on its lanes, uncompiled
dynamo.set_code_exec_strategy(_Attached.__call__.__code__, dynamo._FrameExecStrategy(_SKIP, _SKIP))


class _Guarded(_Attached):
    """A swapped class that notes whoever reaches into the module: its call may still be running on a lane."""

    _mosaic_reach: ClassVar[Callable[[], object]]

    def __getattr__(self, name: str) -> Any:
        if not on_lane():
            type(self)._mosaic_reach()
        return super().__getattr__(name)  # type: ignore[misc]


_REACHING = (
    *("__setattr__", "__delattr__"),
    *("named_modules", "named_children", "_named_members", "state_dict", "load_state_dict", "_apply"),
    *("__getitem__", "__iter__", "keys", "values", "items"),
)
"""Methods of modules and their containers that write, or find parts, parameters and buffers past ``__getattr__``."""


def _reaching(plain: type, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(plain, name))
    def reaching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not on_lane():
            type(self)._mosaic_reach()
        return getattr(plain, name)(self, *args, **kwargs)

    return reaching


def attach(module: nn.Module, intercept: Interceptor, reach: Callable[[], object] | None = None) -> None:
    """Makes ``module(...)`` go through ``intercept(plain_call, args, kwargs)``; undone by ``detach``.

    ``reach`` is called before others than its lane read its parameters, buffers and parts, or write an attribute.
    """
    plain: Any = type(module)
    if issubclass(plain, _Attached):
        raise ValueError(f"this {plain.__name__} is already colocated; call remove() of its handle first")
    kind: Any = type(plain)

    def set_on_plain(cls: type, name: str, value: Any) -> None:  # such as a counter of all instances
        setattr(plain, name, value) if "_mosaic_plain" in vars(cls) else kind.__setattr__(cls, name, value)

    swapped: Any = type.__new__(  # past a metaclass of the user's, which may register what it makes
        type(kind)(kind.__name__, (kind,), {"__setattr__": set_on_plain}),
        plain.__name__,
        (_Attached if reach is None else _Guarded, plain),
        {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
            "__class__": property(_class_now, _set_class),
            "_mosaic_plain": plain,
            "_mosaic_owner": id(module),
            "_mosaic_intercept": staticmethod(intercept),
            "_mosaic_reach": staticmethod(reach) if reach is not None else None,
            **{name: _reaching(plain, name) for name in _REACHING if reach is not None and hasattr(plain, name)},
        },
    )
    _CLASS.__set__(module, swapped)  # past a __setattr__ of the user's


def detach(module: nn.Module) -> None:
    if "_mosaic_plain" in (names := vars(type(module))):
        _CLASS.__set__(module, names["_mosaic_plain"])


def is_attached(module: nn.Module) -> bool:
    return issubclass(type(module), _Attached)
