"""Giving each lane the random numbers that its module would have drawn in the plain loop.

The default generator is one for the whole process. In the plain loop modules draw from it one after another; so
when a module is called, its lane gets a generator in the state of that moment, and the default generator is moved
on by as many draws as the module is known to make. What a module draws is counted the first time it is called.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.engine.calls.hidden import changed_setting, read_settings
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.thread_state import saved_tensor_hooks
from mosaic.find.random_numbers import CPU, torch_state

DRAW_WITH_TORCH = "nothing, or draw with torch.rand and its like only"

OVERLOADS = {
    "aten.rand.default": "generator",
    "aten.rand.out": "generator_out",
    "aten.randn.default": "generator",
    "aten.randint.default": "generator",
    "aten.randint.out": "generator_out",
    "aten.randint.low": "low_generator",
    "aten.randint.low_out": "low_generator_out",
    "aten.randperm.default": "generator",
    "aten.randperm.out": "generator_out",
    "aten.rand_like.default": "generator",
    "aten.randn_like.default": "generator",
    "aten.randint_like.default": "generator",
    "aten.randint_like.low_dtype": "low_generator_dtype",
    "aten.randint_like.Tensor": "Tensor_generator",
}
"""Operators that take no generator, each with its overload that does; all others take one, or none of theirs does."""

_NAMES = frozenset(
    (
        *(
            "dropout",
            "dropout1d",
            "dropout2d",
            "dropout3d",
            "alpha_dropout",
            "feature_alpha_dropout",
            "stochastic_depth",
        ),
        *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "random_", "uniform_"),
        *("normal", "normal_", "log_normal_", "bernoulli", "bernoulli_", "binomial", "multinomial", "poisson"),
        *("cauchy_", "exponential_", "geometric_", "gumbel_softmax", "rrelu"),
    )
)
"""Functions that draw random numbers, as code names them."""
_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU)


class LaneRandomness(TorchDispatchMode):
    """Makes random operators of this thread draw from a lane's own generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gives the generator to an operator that draws, by its overload that takes one."""
        kwargs = kwargs or {}
        if _draws(func) and kwargs.get("generator") is None:
            taking = _taking_generator(func)
            if taking is not None:
                return taking(*args, **{**kwargs, "generator": self._generator})
        return func(*args, **kwargs)


_LANE = threading.local()


@contextmanager
def drawing_from(generator: torch.Generator, *, everywhere: bool) -> Iterator[None]:
    """Makes this thread draw from a lane's generator: every operator, or those in parts that ``draw_here`` takes.

    A mode that watches every operator costs more than many an operator, so the parts are preferred.
    """
    if everywhere:
        with LaneRandomness(generator):
            yield
        return
    _LANE.generator = generator
    try:
        yield
    finally:
        _LANE.generator = None


def draw_here(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module that draws random numbers, such as a dropout; takes its calls by ``attach``."""
    generator = getattr(_LANE, "generator", None)
    if generator is None:
        return plain(*args, **kwargs)
    with LaneRandomness(generator):
        return plain(*args, **kwargs)


class CallWatch(TorchDispatchMode):
    """Notes which random operators a call uses, where, and whether a lane can reproduce them; and changes of settings.

    Attributes:
        setting: The first of torch's settings of the process that changed, perhaps for a while; None where none did.
        obstacle: Why a lane cannot reproduce its random numbers, or None.
        parts: The innermost modules whose calls drew random numbers.
    """

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()
        self.setting: str | None = None
        self.obstacle: Obstacle | None = None
        self.parts: list[nn.Module | None] = []
        self._module = module
        self._inside: list[nn.Module] = []
        self._handles: list[Any] = []
        self._hooks = saved_tensor_hooks()
        self._settings = read_settings()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged."""
        self._look()
        if saved_tensor_hooks() != self._hooks:
            # Recomputing saves and restores the random numbers of the whole process, from each lane's thread.
            self.obstacle = Obstacle(
                "it uses activation checkpointing or other hooks on saved tensors",
                todo="nothing, if memory needs it; on its lane it would run without",
            )
        if not _draws(func):
            return func(*args, **(kwargs or {}))
        if (kwargs or {}).get("generator") is not None:
            self.obstacle = Obstacle(
                "it draws random numbers from a generator of its own, which others may use too", todo=DRAW_WITH_TORCH
            )
        before = torch_state(CPU)
        result = func(*args, **(kwargs or {}))
        part = self._inside[-1] if self._inside else None
        drew = not before.is_same(torch_state(CPU))  # attention without dropout, say, may draw and does not
        if drew and not any(part is known for known in self.parts):
            self.parts.append(part)
        if drew and _taking_generator(func) is None:
            self.obstacle = Obstacle(
                f"it draws random numbers through {func}, which takes no generator", todo=DRAW_WITH_TORCH
            )
        return result

    def __enter__(self) -> Self:
        """Watches, and follows which part of the module is running."""
        for part in self._module.modules() if self._module is not None else ():
            self._handles.append(part.register_forward_pre_hook(lambda part, _: self._inside.append(part)))
            self._handles.append(part.register_forward_hook(lambda *_: self._leave(), always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        """Stops watching."""
        super().__exit__(*reason)
        self._look()
        for handle in self._handles:
            handle.remove()

    def _look(self) -> None:
        self.setting = self.setting or changed_setting(self._settings, read_settings())

    def _leave(self) -> None:
        self._inside.pop()


def may_draw(module: nn.Module | None) -> list[nn.Module]:
    """Returns the parts of a module that may draw random numbers in some calls: dropouts, and those whose code says so.

    Looked at are the methods of classes that are not torch's; not the functions that these call.
    """
    return [part for part in ([] if module is None else module.modules()) if part.training and _may_draw(part)]


def _may_draw(part: nn.Module) -> bool:
    if isinstance(part, _DRAWING):
        return getattr(part, "p", 1.0) > 0
    kind: Any = getattr(type(part), "_mosaic_plain", type(part))  # a swapped class holds the model, and would be kept
    return any(not isinstance(getattr(part, name, None), nn.Module) for name in _random_names(kind))


@functools.lru_cache(maxsize=1000)
def _random_names(kind: Any) -> frozenset[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            for value in vars(base).values():
                if isinstance(value, FunctionType):
                    found.update(_NAMES & frozenset(value.__code__.co_names))
    return frozenset(found)


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _taking_generator(func: Any) -> Any:
    """Returns the overload of an operator that takes a generator and draws the same numbers, or None."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    overloads = func.overloadpacket
    found = OVERLOADS.get(str(func), "")
    return getattr(overloads, found) if found in overloads.overloads() else None
