"""Results of modules that do not run: zeros of their shape, and as many random numbers drawn."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mosaic.errors import UnsplittableError, said_by
from mosaic.find.random_numbers import forked, python_state
from mosaic.parts.split import copied
from mosaic.parts.strategies import is_cache, without_cache

Forward = Callable[..., Any]


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Replaces the modules' ``forward``; hooks still run around it."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns a layer's hidden input: the first tensor among its arguments."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)


@dataclass(frozen=True, slots=True)
class Draw:
    """One operator that draws random numbers."""

    operator: Any
    leaves: tuple[Any, ...]
    """Its arguments; tensors have no data."""
    tree: Any
    """Tree of the arguments."""

    def repeat(self, device: torch.device) -> None:
        """Draws as many numbers, and discards them."""
        arguments = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device).fill_(1)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(arguments, self.tree)
        self.operator(*args, **kwargs)


class DrawsSeen(TorchDispatchMode):
    """Records random operators while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: list[Draw] = []

    def draws(self) -> Sequence[Draw]:
        """Returns the recorded operators in order."""
        return tuple(self._draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and records it if it draws."""
        if draws_random_numbers(func, args, kwargs or {}):
            leaves, tree = pytree.tree_flatten((args, kwargs or {}))
            self._draws.append(Draw(func, tuple(map(_without_data, leaves)), tree))
        return func(*args, **(kwargs or {}))


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if an operator of torch draws random numbers; fused attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    return "dropout_p" not in names or arguments.get("dropout_p", 0.0) != 0.0


@dataclass(frozen=True, slots=True)
class _Blank:
    leaves: tuple[Any, ...]
    """Leaves of the result; tensors have no data."""
    tree: Any
    """Their tree."""
    draws: Sequence[Draw]
    """Its random operators."""
    draws_in_python: bool
    """True if it draws from Python's or numpy's generator."""
    has_effects: bool
    """True if a run changes arguments or buffers, or draws numbers of numpy or Python."""
    passed: tuple[int | None, ...]
    """The index of the arguments' leaf that each leaf is, or is a view of."""


class BlankResults:
    """Results of modules by the shapes of arguments, from one run without data.

    Args:
        device: Device of the results.
        alone: A context in which no other thread uses the modules' weights, which a run replaces.

    Attributes:
        by_values: Ids of modules whose results depend on values: they run each time.
    """

    def __init__(self, device: torch.device, alone: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._device = device
        self._alone = alone
        self._known: dict[Hashable, _Blank] = {}
        self.by_values: set[int] = set()
        self._precisions: dict[Hashable, torch.dtype] = {}

    def forget(self) -> None:
        """Clears the results and draws of all calls."""
        self._known.clear()

    def of(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], Any]:
        """Returns the leaves of a call's result, tensors as zeros, and their tree."""
        blank = self._blank(module, forward, args, kwargs)
        leaves = [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in blank.leaves
        ]
        return leaves, blank.tree

    def passed_by(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Returns the argument that each leaf of a call's result is, or is a view of, or None."""
        arguments, _ = _flat(args, kwargs)
        passed = self._blank(module, forward, args, kwargs).passed
        return [None if number is None else arguments[number] for number in passed]

    def has_effects(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Returns True if a run changes arguments or buffers, or draws numbers of numpy or Python."""
        return self._blank(module, forward, args, kwargs).has_effects

    def in_precision_of(
        self, name: str, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Returns a layer's hidden input in the dtype of its result, which may differ under autocast.

        Args:
            name: Name of the list of equal layers.
            module: One of the layers.
            forward: Its own ``forward``.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        hidden = hidden_of(args, kwargs)
        if hidden is None or not torch.is_autocast_enabled(self._device.type):
            return hidden
        key = (name, torch.get_autocast_dtype(self._device.type), hidden.dtype)
        if key not in self._precisions:
            self._precisions[key] = self.of(module, forward, args, kwargs)[0][0].dtype
        return hidden.to(self._precisions[key])

    def draw(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Draws the random numbers of a call."""
        blank = self._blank(module, forward, args, kwargs)
        for draw in blank.draws:
            draw.repeat(self._device)
        if blank.draws_in_python:
            with self._alone():
                self._run(module, forward, *_flat(args, kwargs))

    def _blank(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Blank:
        arguments, tree = _flat(args, kwargs)
        cast = torch.is_autocast_enabled(self._device.type) and torch.get_autocast_dtype(self._device.type)
        key = (id(module), module.training, cast, str(tree), *map(_key, arguments))
        if key in self._known:
            return self._known[key]
        with self._alone(), forked(self._device):
            blank = self._run(module, forward, arguments, tree)
        if id(module) not in self.by_values:
            self._known[key] = blank
        return blank

    def _run(self, module: nn.Module, forward: Forward, arguments: list[Any], tree: Any) -> _Blank:
        """Runs a module without data; if it reads values, with data, and zeros for weights on the meta device."""
        before = python_state()
        if id(module) not in self.by_values:
            try:
                with _quiet_fake_tensors():
                    return _recorded(module, forward, list(map(self._empty, arguments)), tree, self._empty)
            except Exception:  # of any kind: it reads values, or an operator fails without data
                self.by_values.add(id(module))
        with forked(self._device, python=False):
            try:
                before.restore()
                return _recorded(module, forward, copied(arguments), tree, self._zero)
            except Exception:  # of any kind: some operators need memory of usual strides
                before.restore()
            try:
                return _recorded(module, forward, copied(arguments), tree, partial(self._zero, with_memory=True))
            except Exception as error:  # of any kind: it is the user's code that runs
                raise UnsplittableError(
                    f"what {type(module).__name__} returns cannot be foreseen: on a rank without its weights it raises "
                    f"{said_by(error)}; see that it runs with weights of zeros"
                ) from error

    def _zero(self, weight: torch.Tensor, *, is_buffer: bool, with_memory: bool = False) -> torch.Tensor:
        if weight.is_meta:
            weight = torch.zeros((), dtype=weight.dtype, device=self._device).expand(weight.shape)
        if is_buffer:
            return weight.clone(memory_format=torch.contiguous_format)  # the module may write into it
        return weight.contiguous() if with_memory else weight

    def _empty(self, leaf: Any, *, is_buffer: bool = False) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self._device)


def _recorded(
    module: nn.Module, forward: Forward, arguments: list[Any], tree: Any, weight: Callable[..., torch.Tensor]
) -> _Blank:
    """Runs a module with other weights, and records its effects."""
    weights = {f"inner.{name}": weight(each, is_buffer=False) for name, each in module.named_parameters()}
    buffers = {f"inner.{name}": weight(each, is_buffer=True) for name, each in module.named_buffers()}
    before, versions = python_state(), _versions([*arguments, *buffers.values()])
    with torch.no_grad(), DrawsSeen() as seen, _inner_hooks_off(module):
        result = functional_call(_Bare(module, forward), weights | buffers, *pytree.tree_unflatten(arguments, tree))
    draws_in_python = not before.is_same(python_state())
    leaves, spec = pytree.tree_flatten(result)
    memory = {
        argument.untyped_storage()._cdata: index
        for index, argument in enumerate(arguments)
        if isinstance(argument, torch.Tensor)
    }
    return _Blank(
        leaves=tuple(map(_without_data, leaves)),
        tree=spec,
        draws=seen.draws(),
        draws_in_python=draws_in_python,
        has_effects=draws_in_python or versions != _versions([*arguments, *buffers.values()]),
        passed=tuple(
            memory.get(leaf.untyped_storage()._cdata) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
        ),
    )


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """Computes shapes alone, and silences torch's log of operators that fail without data."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


@contextmanager
def _inner_hooks_off(module: nn.Module) -> Iterator[None]:
    """Lets no hook of a module inside see what is computed without data."""
    inner = [part for part in module.modules() if part is not module and part._forward_hooks]
    before = [part._forward_hooks for part in inner]
    for part in inner:
        part._forward_hooks = OrderedDict()
    try:
        yield
    finally:
        for part, hooks in zip(inner, before, strict=True):
            part._forward_hooks = hooks


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _flat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Returns the leaves and the tree of arguments, without caches, which a run would fill."""
    leaves, tree = pytree.tree_flatten((args, dict(kwargs)), is_leaf=is_cache)
    return list(map(without_cache, leaves)), tree


class _Bare(nn.Module):
    """Calls a module's own ``forward``, even while a chunk replaces it."""

    def __init__(self, inner: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.inner = inner
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | None) else type(leaf).__qualname__


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with _disable_current_modes():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
