"""Memory and arithmetic of a training step, counted in one forward on tensors without data.

A model is never made on a device to find out that it does not fit. What autocast and attention do on CUDA is done here
on the meta device, which knows neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mosaic.cost.counting import CudaFunctions

PARAMETER_BYTES = 20
"""A parameter's value, gradient, AdamW's two moments, and the copy that measurements begin again from; 4 bytes each."""
GRAPH_PARAMETER_BYTES = 4
"""Gradients of a CUDA graph's own."""
POOLS = 2
"""Kept activations are there twice: of the plain step, and in the pool of a CUDA graph that takes turns with it."""
TEMPORARIES = 3
"""Temporaries at a step's peak, as multiples of the largest tensor that is kept: gradients of logits, and casts."""
FIXED_BYTES = 3 << 30
"""Context and libraries (about 1 GiB), and workspaces of cuBLAS: 32 MiB a stream and handle, two handles (forward's and
autograd's) on up to 32 streams."""
USABLE_SHARE = 0.9
"""Of the memory; the rest is lost to fragmentation."""

_LOW = frozenset(("linear", "matmul", "__matmul__", "__rmatmul__", "bmm", "conv1d", "conv2d", "conv3d"))
_ATTENTION = "scaled_dot_product_attention"
_FULL = frozenset(("layer_norm", "cross_entropy", "softmax", "log_softmax", "l1_loss", "mse_loss", "kl_div"))
"""Of what CUDA's autocast runs in 16 and in 32 bits, those that the models call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of one sample."""

    parameters: int
    """Parameters, each once."""
    cast_bytes: int
    """Casts of parameters, kept for backward whatever the batch."""
    kept_bytes: int
    """Other storages kept for backward, without parameters."""
    largest_bytes: int
    """The largest of these."""
    flops: Mapping[str, float]
    """Operations of products and attention by module; under an empty name those outside of all."""


def count_forward(model: nn.Module, run: Callable[[], object], modules: Sequence[str] = ()) -> Forward:
    """Counts a forward of a model on the meta device with one sample, under autocast as on CUDA.

    ``modules``: paths of those whose operations are told apart; none of them is inside another.
    """
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that no address is used again
        return tensor

    cuda = _CudaAutocast()
    with ExitStack() as stack:
        for path in modules:
            cuda.follow(model.get_submodule(path), path, stack)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
        stack.enter_context(CudaFunctions())
        stack.enter_context(cuda)
        run()
    casts = cuda.casts
    sizes = [storage.nbytes() for key, storage in kept.items() if key not in casts]
    return Forward(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        cast_bytes=sum(storage.nbytes() for key, storage in kept.items() if key in casts),
        kept_bytes=sum(sizes),
        largest_bytes=max(sizes, default=0),
        flops=dict(cuda.flops),
    )


def needed_bytes(forward: Forward, *, batch: int) -> int:
    """Returns what training at a batch takes."""
    state = forward.parameters * (PARAMETER_BYTES + GRAPH_PARAMETER_BYTES)
    kept = forward.cast_bytes + batch * forward.kept_bytes
    return state + POOLS * kept + TEMPORARIES * batch * forward.largest_bytes + FIXED_BYTES


def usable_bytes(memory_bytes: int) -> int:
    """Returns what of a device's memory can be filled."""
    return int(USABLE_SHARE * memory_bytes)


class _CudaAutocast(TorchFunctionMode):
    """Casts to bfloat16 and to float32 where CUDA's autocast does, and counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: defaultdict[str, float] = defaultdict(float)
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._inside = ""

    @property
    def casts(self) -> set[int]:
        """Storages of the casts of parameters."""
        return {cast.untyped_storage()._cdata for _, cast in self._casts.values()}

    def follow(self, module: nn.Module, name: str, stack: ExitStack) -> None:
        """Counts what runs in a module under a name."""

        def enter(*_: object) -> None:
            self._inside = name

        def leave(*_: object) -> None:
            self._inside = ""

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave).remove)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Casts and counts."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "rms_norm":  # one kernel on CUDA, which keeps what this one does; elsewhere it is put together
            return _normed(*args, **kwargs)
        if name in _FULL:
            args = [self._cast(value, torch.float32) for value in args]
            kwargs = {key: self._cast(value, torch.float32) for key, value in kwargs.items()}
        if name in _LOW or name == _ATTENTION:
            args = [self._cast(value, torch.bfloat16) for value in args]
        result = func(*args, **kwargs)
        if name in _LOW:
            self.flops[self._inside] += 2 * result.numel() * _summed(name, args)
        if name == _ATTENTION:
            seen = 0.5 if kwargs.get("is_causal") else 1.0
            self.flops[self._inside] += 4 * seen * args[0].numel() * args[1].shape[-2]
        return result

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = (value, value.to(dtype))
        return self._casts[id(value)][1]


def _normed(
    x: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return torch.layer_norm(x, list(shape), weight, eps=eps or 1e-6)


def _summed(name: str, args: Any) -> int:
    """Returns how many products are summed for each number of a result."""
    if "conv" in name:
        return int(args[1][0].numel())
    return int(args[0].shape[-1])
