"""Taking a module's calls by swapping its class, as FSDP2 does: keys, isinstance and references stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

Interceptor = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Attached:
    """First base of a swapped class; the instance itself holds nothing of Mosaic."""

    _mosaic_plain: ClassVar[type[nn.Module]]
    _mosaic_owner: ClassVar[int]
    _mosaic_intercept: ClassVar[Interceptor]
    _mosaic_settle: ClassVar[Callable[[], object] | None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        plain = super().__call__  # type: ignore[misc]  # nn.Module's
        if id(self) != kind._mosaic_owner:  # a copy made by hand through type(module)
            return plain(*args, **kwargs)
        return kind._mosaic_intercept(plain, args, kwargs)

    def train(self, mode: bool = True) -> Any:
        """Lets the lanes come to rest before the mode changes: what was called before runs in the old one."""
        kind = type(self)
        if kind._mosaic_settle is not None and id(self) == kind._mosaic_owner:
            kind._mosaic_settle()
        return super().train(mode)  # type: ignore[misc]  # nn.Module's

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies as the plain class, so that a copy runs its own weights in the plain way."""
        kind = type(self)
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        arguments = tuple(kind._mosaic_plain if item is kind else item for item in reduced[1])
        # pickle holds copyreg's own constructor to the object's present class; ours takes the plain one.
        constructor = _construct if reduced[0].__name__ == "__newobj__" else reduced[0]
        return (constructor, arguments, *reduced[2:])


def _construct(kind: type[nn.Module], *args: Any) -> nn.Module:
    return kind.__new__(kind, *args)


def attach(module: nn.Module, intercept: Interceptor, settle: Callable[[], object] | None = None) -> None:
    """Makes ``module(...)`` go through ``intercept(plain_call, args, kwargs)``; undone by ``detach``.

    Args:
        module: The module.
        intercept: Takes its calls.
        settle: Called before the module changes its mode.

    Raises:
        ValueError: The module is attached already.
    """
    plain = type(module)
    if issubclass(plain, _Attached):
        raise ValueError(f"this {plain.__name__} is colocated already; remove() the first handle before")
    swapped = type(
        plain.__name__,
        (_Attached, plain),
        {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
            "_mosaic_plain": plain,
            "_mosaic_owner": id(module),
            "_mosaic_intercept": staticmethod(intercept),
            "_mosaic_settle": staticmethod(settle) if settle is not None else None,
        },
    )
    module.__class__ = swapped


def detach(module: nn.Module) -> None:
    """Gives a module its plain class back; does nothing to a plain module."""
    kind = type(module)
    if issubclass(kind, _Attached):
        module.__class__ = kind._mosaic_plain


def is_attached(module: nn.Module) -> bool:
    """Whether a module's calls are taken."""
    return issubclass(type(module), _Attached)
