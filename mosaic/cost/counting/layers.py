"""Counts equal layers of a module once per input size.

The first call of a block with inputs of a size is counted alone, forward and backward. In the module's run every such
call is then replaced by one autograd node with results without data and the counted operators and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from mosaic.cost.counting.operators import Recorder, Tally, tensors_of
from mosaic.cost.counts import Operator, merge_equal

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OWN = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NUMBERS = frozenset(["layer_idx", "layer_index", "layer_id"])
"""Attributes that number a layer without effect (transformers)."""


class _Kind(NamedTuple):
    """A tensor without its data."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kind:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def new(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)  # on the device of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """One call of a layer, forward and backward."""

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    held_bytes: int
    """Storages saved by autograd, except inputs, results and parameters."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    """Above the live bytes before the call, without inputs."""
    saved_inputs: tuple[int, ...]
    """Tensors of the arguments saved by autograd, by index."""
    results: tuple[Any, ...]
    """Leaves of the result: tensor metadata and plain values."""
    saved_results: tuple[bool, ...]
    structure: Any
    """Pytree of the result."""


LayerCounts = dict[Hashable, "_Counted | None"]
"""Counts by layer and size, shared within one model; None: the call must run each time."""


class RepeatedLayers:
    """Counts equal layers in lists and sequences of a module once.

    Args:
        recorder: Receives operators and memory.
        counts: Counts so far.
        settings: Other settings that distinguish calls, such as the autocast dtype.
    """

    def __init__(self, recorder: Recorder, counts: LayerCounts, settings: Hashable) -> None:
        self._recorder, self._counts, self._settings = recorder, counts, settings

    @contextmanager
    def replaced(self, module: nn.Module) -> Iterator[None]:
        """Replaces the forwards of equal layers within the context."""
        layers: dict[nn.Module, Hashable] = {}
        for holder in module.modules():
            if isinstance(holder, nn.ModuleList | nn.Sequential):
                makeups = {child: _makeup(child) for child in holder if any(True for _ in child.parameters())}
                counts = Counter(makeups.values())
                layers |= {child: own for child, own in makeups.items() if own is not None and counts[own] > 1}
        for layer, makeup in layers.items():
            layer.forward = partial(self._call, layer, makeup, layer.forward)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _call(self, layer: nn.Module, makeup: Hashable, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(leaf, (*_PLAIN, torch.Tensor)) for leaf in leaves):
            return run(*args, **kwargs)
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        state = (torch.is_grad_enabled(), autocast, self._settings)
        key = (makeup, str(tree), _sizes(leaves), state)
        if key not in self._counts:
            self._counts[key] = self._count(layer, run, leaves, tree)
        counted = self._counts[key]
        return run(*args, **kwargs) if counted is None else self._stand_in(layer, counted, tensors_of(leaves))

    def _count(self, layer: nn.Module, run: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> _Counted | None:
        """Counts one call."""
        copies = _copies(leaves)
        inputs = tensors_of(copies)
        parameters = [*layer.parameters(), *layer.buffers()]
        tally = Tally(parameters, inputs)
        self._recorder.tallies.append(tally)
        gradients = [parameter.grad for parameter in layer.parameters()]
        try:
            args, kwargs = pytree.tree_unflatten(copies, tree)
            with saved_tensors_hooks(self._recorder.save, lambda tensor: tensor):  # of an enclosing checkpoint
                output = run(*args, **kwargs)
            own = {id(tensor.untyped_storage()) for tensor in (*inputs, *parameters)}
            results, structure = pytree.tree_flatten(output)
            tensors = tensors_of(results)
            storages = [id(tensor.untyped_storage()) for tensor in tensors]
            is_plain = all(isinstance(leaf, (*_PLAIN, torch.Tensor)) for leaf in results)
            is_changed = any(tensor._version for tensor in inputs)
            if not is_plain or is_changed or own & set(storages) or len(set(storages)) < len(storages):
                return None
            saved = dict(tally.saved)
            shared = {*own, *storages}
            saved_inputs = tuple(i for i, tensor in enumerate(inputs) if id(tensor.untyped_storage()) in saved)
            saved_results = tuple(id(tensor.untyped_storage()) in saved for tensor in tensors)
            described = tuple(_Kind.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in results)
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            gradients_of_results = [torch.empty_like(tensor) for tensor in trained]
            unsaved = [tensor for tensor, is_saved in zip(tensors, saved_results, strict=True) if not is_saved]
            tally.forward_peak_bytes = tally.memory.peak_bytes
            for tensor in (*unsaved, *gradients_of_results):
                tally.memory.release(tensor)  # the module's run counts it
            tally.start_backward()
            if trained:
                torch.autograd.backward(trained, gradients_of_results)
        finally:
            self._recorder.tallies.pop()
            for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                parameter.grad = gradient
        return _Counted(
            forward=merge_equal(tally.phases[0]),
            backward=merge_equal(tally.phases[1]),
            held_bytes=sum(size for key, size in saved.items() if key not in shared),
            forward_peak_bytes=tally.forward_peak_bytes,
            backward_peak_bytes=tally.memory.peak_bytes,
            saved_inputs=saved_inputs,
            saved_results=saved_results,
            results=described,
            structure=structure,
        )

    def _stand_in(self, layer: nn.Module, counted: _Counted, inputs: Sequence[torch.Tensor]) -> Any:
        tally = self._recorder.tallies[-1]
        tally.operators.extend(counted.forward)
        tally.memory.touch(counted.forward_peak_bytes)
        kinds = [leaf for leaf in counted.results if isinstance(leaf, _Kind)]
        if any(kind.requires_grad for kind in kinds) and torch.is_grad_enabled():
            anchor = torch.empty((), requires_grad=True)  # makes results of trainable weights differentiable
            tensors = iter(_Layer.apply(counted, self._recorder, anchor, *inputs))
        else:
            tensors = iter([kind.new() for kind in kinds])
        leaves = [next(tensors) if isinstance(leaf, _Kind) else leaf for leaf in counted.results]
        return pytree.tree_unflatten(leaves, counted.structure)


class _Layer(torch.autograd.Function):
    """The call of a counted layer."""

    @staticmethod
    def forward(
        ctx: Any, counted: _Counted, recorder: Recorder, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.counted, ctx.recorder, ctx.inputs = counted, recorder, [_Kind.of(tensor) for tensor in inputs]
        kinds = [leaf for leaf in counted.results if isinstance(leaf, _Kind)]
        results = tuple(kind.new() for kind in kinds)
        ctx.mark_non_differentiable(*(r for r, kind in zip(results, kinds, strict=True) if not kind.requires_grad))
        saved_results = (r for r, is_saved in zip(results, counted.saved_results, strict=True) if is_saved)
        saved_bytes = torch.empty(counted.held_bytes, dtype=torch.uint8)
        ctx.save_for_backward(saved_bytes, *(inputs[at] for at in counted.saved_inputs), *saved_results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _ = ctx.saved_tensors  # an enclosing checkpoint recomputes it
        tally, counted = ctx.recorder.tallies[-1], ctx.counted
        tally.operators.extend(counted.backward)
        tally.memory.touch(counted.backward_peak_bytes - counted.held_bytes)
        return None, None, None, *(kind.new() if kind.requires_grad else None for kind in ctx.inputs)


def _makeup(layer: nn.Module) -> Hashable:
    """Returns everything except inputs that determines a layer's operators; None if unknown."""
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        if module is not layer and any(getattr(module, hooks) for hooks in _HOOKS):
            return None
        tensors = (*module._parameters.items(), *module._buffers.items())
        parts.append((name, type(module), module.training, _sizes([tensor for _, tensor in tensors])))
        for key, value in module.__dict__.items():
            if key not in _OWN and key not in _NUMBERS:
                parts.append((key, value if isinstance(value, _PLAIN) else _plain(value)))
    return tuple(parts)


def _plain(value: Any) -> Hashable:
    if isinstance(value, tuple | list) and all(isinstance(entry, _PLAIN) for entry in value):
        return tuple(value)
    return id(value)


def _sizes(leaves: Sequence[Any]) -> Hashable:
    """Returns shapes and dtypes of tensors, other values, and the sharing of storages."""
    first: dict[int, int] = {}
    sizes: list[Hashable] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            shared = first.setdefault(id(leaf.untyped_storage()), index)
            sizes.append((*_Kind.of(leaf), shared))
        else:
            sizes.append((type(leaf), leaf))
    return tuple(sizes)


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """Returns new tensors of the same sizes; repeated tensors stay one."""
    copies = {
        id(leaf): _Kind.of(leaf).new().requires_grad_(leaf.requires_grad)
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }
    return [copies.get(id(leaf), leaf) for leaf in leaves]
