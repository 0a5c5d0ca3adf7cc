"""Inner modules of layers whose results hooks keep, such as routers' logits for a loss."""

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
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    return None


@dataclass(frozen=True, slots=True)
class HookedCall:
    """One call of a module with forward hooks, inside of a site's call."""

    path: str
    """The module's name in the site."""
    leaves: tuple[Any, ...]
    """Leaves of its result; tensors have no data."""
    tree: Any
    """Tree of the leaves."""

    @property
    def tensors(self) -> tuple[int, ...]:
        """Indices of its leaves that are tensors."""
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
    """Records calls of a site's inner modules with forward hooks, and disables these hooks."""
    modules = [(path, module) for path, module in site.named_modules() if path and module._forward_hooks]
    before = [module._forward_hooks for _, module in modules]
    for path, module in modules:
        module._forward_hooks = OrderedDict()
        module.register_forward_hook(_recorder(path, calls))
    try:
        yield
    finally:
        for (_, module), hooks in zip(modules, before, strict=True):
            module._forward_hooks = hooks


def _recorder(path: str, calls: list[HookedCall]) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        leaves, tree = pytree.tree_flatten(output)
        calls.append(HookedCall(path, tuple(map(without_data, leaves)), tree))

    return note


def without_data(leaf: Any) -> Any:
    """Returns a leaf, or its copy on the meta device if it is a tensor."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


class HookedResults(threading.local):
    """Results of hooked modules while a thread runs their site; None: it runs none."""

    seen: dict[str, list[Any]] | None = None

    @contextmanager
    def collected(self) -> Iterator[dict[str, list[Any]]]:
        """Collects the results, by the module's name in the model."""
        self.seen = {}
        try:
            yield self.seen
        finally:
            self.seen = None


def watching(path: str, module: nn.Module, results: HookedResults) -> Forward:
    """Returns a ``forward`` that records the results of the module's own."""
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
    """Returns the tensors of hooked calls in order, from the modules' results."""
    counts: dict[str, int] = {}
    tensors: list[torch.Tensor | None] = []
    for call in calls:
        path = f"{site}.{call.path}"
        number = counts[path] = counts.get(path, -1) + 1
        results = seen.get(path, ())
        leaves = pytree.tree_leaves(results[number]) if number < len(results) else ()
        tensors += [leaves[at] if at < len(leaves) else None for at in call.tensors]
    return tensors
