"""Results of modules that do not run: zeros of the shape that they would have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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
        """Runs a module on tensors without data; its weights may be on the meta device."""
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            args, kwargs = pytree.tree_unflatten([self._fake(leaf) for leaf in given], tree)
            weights = {f"inner.{name}": self._fake(tensor) for name, tensor in module.named_parameters()}
            weights |= {f"inner.{name}": self._fake(tensor) for name, tensor in module.named_buffers()}
            result = functional_call(_Bare(module, forward), weights, args, kwargs)
        leaves, spec = pytree.tree_flatten(result)
        return [
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ], spec

    def _fake(self, leaf: Any) -> Any:
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
