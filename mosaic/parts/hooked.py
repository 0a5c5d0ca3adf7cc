"""Modules inside of layers whose results hooks keep, such as routers' logits for a loss: seen, and stood in for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.parts.doors import Forward


@dataclass(frozen=True, slots=True)
class HookedCall:
    """One call of a module with forward hooks, inside of a site's call."""

    path: str
    """The module's name in the site."""
    leaves: tuple[Any, ...]
    """Of what it returned, tensors without data."""
    tree: Any
    """How they are nested."""

    @property
    def tensors(self) -> tuple[int, ...]:
        """Which of its leaves are tensors."""
        return tuple(number for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))

    def run_hooks(self, site: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """Calls the module's hooks as its own call would, with these tensors as its result."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            leaves[number] = tensor
        module, output = site.get_submodule(self.path), pytree.tree_unflatten(leaves, self.tree)
        for key, hook in tuple(module._forward_hooks.items()):
            if key in module._forward_hooks_with_kwargs:
                hook(module, (), {}, output)
            else:
                hook(module, (), output)


@contextmanager
def recorded_hooked_calls(site: nn.Module, calls: list[HookedCall]) -> Iterator[None]:
    """Notes calls of a site's inner modules that have forward hooks, in the place of these hooks."""
    found = [(path, module) for path, module in site.named_modules() if path and module._forward_hooks]
    before = [module._forward_hooks for _, module in found]
    for path, module in found:
        module._forward_hooks = OrderedDict()
        module.register_forward_hook(_noting(path, calls))
    try:
        yield
    finally:
        for (_, module), hooks in zip(found, before, strict=True):
            module._forward_hooks = hooks


def _noting(path: str, calls: list[HookedCall]) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        leaves, tree = pytree.tree_flatten(output)
        calls.append(HookedCall(path, tuple(map(without_data, leaves)), tree))

    return note


def without_data(leaf: Any) -> Any:
    """Returns a leaf, a tensor as one on the meta device."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


class HookedResults(threading.local):
    """What hooked modules return while a thread runs their site; None: it runs none."""

    seen: dict[str, list[Any]] | None = None

    @contextmanager
    def collected(self) -> Iterator[dict[str, list[Any]]]:
        """Collects them for a while, by the module's name in the model."""
        self.seen = {}
        try:
            yield self.seen
        finally:
            self.seen = None


def watching(path: str, module: nn.Module, results: HookedResults) -> Forward:
    """Returns a ``forward`` that notes what the module's own returns."""
    own: Forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        if results.seen is not None:
            results.seen.setdefault(path, []).append(result)
        return result

    return forward


def tensors_seen(
    site: str, calls: Sequence[HookedCall], seen: Mapping[str, Sequence[Any]]
) -> list[torch.Tensor | None]:
    """Returns the tensors of hooked calls in their order, from what each module returned."""
    counts: dict[str, int] = {}
    found: list[torch.Tensor | None] = []
    for call in calls:
        path = f"{site}.{call.path}"
        number = counts[path] = counts.get(path, -1) + 1
        results = seen.get(path, ())
        leaves = pytree.tree_leaves(results[number]) if number < len(results) else ()
        found += [leaves[at] if at < len(leaves) else None for at in call.tensors]
    return found
