"""Results of modules that do not run: zeros of the shape that they would have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree


class BlankResults:
    """Knows by shapes of arguments what modules return; learns it by a run without data.

    Args:
        device: Where results are to be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, tuple[list[Any], Any]] = {}

    def of(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], Any]:
        """Returns the leaves of what a call would return, tensors as zeros, and their tree."""
        given, tree = pytree.tree_flatten((args, dict(kwargs)))
        cast = torch.is_autocast_enabled(self._device.type) and torch.get_autocast_dtype(self._device.type)
        key = (id(module), module.training, cast, str(tree), *map(_key, given))
        if key not in self._known:
            self._known[key] = self._run(module, forward, given, tree)
        leaves, spec = self._known[key]
        return [self._zeros(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, device=self._device)

    def _run(
        self, module: nn.Module, forward: Callable[..., Any], given: list[Any], tree: Any
    ) -> tuple[list[Any], Any]:
        """Runs a module without data; if it reads values, with data, and zeros for weights on the meta device."""
        try:
            with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
                args, kwargs = pytree.tree_unflatten([self._empty(leaf) for leaf in given], tree)
                result = self._call(module, forward, args, kwargs, self._empty)
        except DataDependentOutputException:
            with torch.no_grad():
                args, kwargs = pytree.tree_unflatten(given, tree)
                result = self._call(module, forward, args, kwargs, self._zero)
        leaves, spec = pytree.tree_flatten(result)
        return [
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ], spec

    @staticmethod
    def _call(
        module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, weight: Callable[[Any], torch.Tensor]
    ) -> Any:
        tensors = (*module.named_parameters(), *module.named_buffers())
        weights = {f"inner.{name}": weight(tensor) for name, tensor in tensors}
        return functional_call(_Bare(module, forward), weights, args, kwargs)

    def _zero(self, weight: torch.Tensor) -> torch.Tensor:
        if not weight.is_meta:
            return weight
        return torch.zeros((), dtype=weight.dtype, device=self._device).expand(weight.shape)

    def _empty(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self._device)


class _Bare(nn.Module):
    """Calls a module's own ``forward``, which is replaced while a chunk runs."""

    def __init__(self, inner: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | None) else type(leaf).__qualname__
