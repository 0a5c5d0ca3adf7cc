"""The operators of a call: FLOPs by torch's counter, bytes from tensors, memory from live storages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mosaic.cost.counts import Operator, OperatorKind

_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "flex_attention")
_CONV = ("convolution", "cudnn_convolution", "_slow_conv", "_convolution", "mkldnn_convolution")
_WRITE_ONLY = frozenset(["copy", "fill", "zero", "uniform", "normal", "bernoulli", "random", "exponential"])
"""In-place operators that do not read what they overwrite."""
_GATHERS = frozenset(["embedding", "index", "index_select", "gather", "take", "_embedding_bag", "_unsafe_index"])
"""Operators that read as much of their first input as they write."""
_SCATTERS = frozenset(
    ["_index_put_impl", "_unsafe_index_put", "index_add", "index_copy", "index_put", "scatter", "scatter_add"]
)
"""In-place operators that write at most the size of their other inputs."""
_KERNELS = {
    "native_layer_norm_backward": 2,  # the input's gradient, then those of weight and bias
    "native_group_norm": 2,
    "native_group_norm_backward": 3,
    "embedding_dense_backward": 2,  # zeros, then the sums
    "_scaled_dot_product_flash_attention_backward": 3,  # row sums, the main kernel, the query's gradient
    "_scaled_dot_product_efficient_attention_backward": 2,
}
"""Numbers of kernels of operators that launch several, from torch's sources."""


def short_name(func: Any) -> str:
    """Returns an operator's name without namespace, overload and in-place suffix."""
    name: str = func._schema.name.split("::")[-1]
    return name.removesuffix("_") if len(name) > 1 and not name.startswith("__") else name


def kind_of(func: Any) -> OperatorKind:
    name = short_name(func)
    if name.startswith(_ATTENTION):
        return OperatorKind.ATTENTION
    if name.startswith(_CONV):
        return OperatorKind.CONV
    if func._overloadpacket in flop_registry or name.startswith("mkldnn_rnn_layer"):
        return OperatorKind.MATMUL
    return OperatorKind.MEMORY


def count_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Returns the FLOPs of a product, convolution or attention; 0 for other operators.

    From ``torch.utils.flop_counter``, corrected for grouped queries, for causal attention, whose kernels skip the
    masked half, and for fused recurrent layers.
    """
    name = short_name(func)
    if name.startswith("_scaled_dot_product_"):
        arguments = _named(func, args, kwargs)
        query, key, value = arguments["query"], arguments["key"], arguments["value"]
        products = 5 if "backward" in name else 2
        flops = products * query.shape[:3].numel() * key.shape[2] * (query.shape[3] + value.shape[3])
        return int(flops // 2 if arguments.get("is_causal") is True else flops)
    if name.startswith("mkldnn_rnn_layer"):
        arguments = _named(func, args, kwargs)
        is_backward = "backward" in name
        weights = ("weight1", "weight2") if is_backward else ("weight0", "weight1")
        steps = arguments["input"].shape[0] * arguments["input"].shape[1]
        return int((4 if is_backward else 2) * steps * sum(arguments[weight].numel() for weight in weights))
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def describe(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Operator | None:
    """Returns an operator's call; None for views and allocations."""
    name = short_name(func)
    read, written = _traffic(func, args, kwargs, result)
    if written is None or torch.Tag.inplace_view in func.tags or "empty" in name:
        return None
    kernels = _KERNELS.get(name, 1)
    if name == "convolution_backward":  # separate kernels for the gradients of input, weight and bias
        kernels = max(1, sum(map(bool, _named(func, args, kwargs)["output_mask"])))
    return Operator(
        name=f"{func.namespace}.{func._schema.name.split('::')[-1]}",
        kind=kind_of(func),
        dtype=_dtype(tensors_of(result) or tensors_of((args, kwargs))),
        flops=count_flops(func, args, kwargs, result),
        read_bytes=read,
        written_bytes=written,
        kernels=kernels,
    )


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


def _traffic(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[int, int | None]:
    """Returns the bytes that a call reads and writes; writes are None if it only makes views."""
    name = short_name(func)
    arguments = {argument.name: argument for argument in func._schema.arguments}
    reads: list[int] = []
    overwritten, is_in_place = 0, False
    sources: set[int] = set()
    for argument, value in _named(func, args, kwargs).items():
        alias = arguments[argument].alias_info
        for tensor in tensors_of(value):
            sources.add(id(tensor.untyped_storage()))
            if alias is not None and alias.is_write:
                is_in_place = True
                overwritten += num_bytes(tensor)
                if name not in _WRITE_ONLY and not arguments[argument].is_out:
                    reads.append(num_bytes(tensor))
            else:
                reads.append(num_bytes(tensor))
    results = {id(tensor.untyped_storage()): num_bytes(tensor) for tensor in tensors_of(result)}
    fresh = [size for key, size in results.items() if key not in sources]
    if not is_in_place and not fresh:
        return 0, None
    if name in _GATHERS and reads:
        reads[0] = min(reads[0], sum(fresh))
    if name in _SCATTERS and is_in_place and len(reads) > 1:
        overwritten = min(overwritten, sum(reads[1:]))
        reads[0] = overwritten
    return sum(reads), overwritten + sum(fresh)


def num_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor, at most those of its storage if it is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _dtype(tensors: list[torch.Tensor]) -> str:
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    first = next(iter(floating or tensors), None)
    return "none" if first is None else str(first.dtype).removeprefix("torch.")


class LiveMemory:
    """Live bytes of storages, and their peak.

    Args:
        resident: Tensors counted elsewhere: parameters, buffers and arguments.
    """

    def __init__(self, resident: Iterable[torch.Tensor]) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._resident = [tensor.untyped_storage() for tensor in resident]  # references prevent the reuse of ids
        self._bytes_of: dict[int, int] = {id(storage): 0 for storage in self._resident}

    def start_phase(self) -> None:
        """Resets the peak."""
        self.peak_bytes = self.live_bytes

    def add(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._bytes_of:
            self._bytes_of[key] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.touch(0)
            weakref.finalize(storage, self._drop, key).atexit = False

    def touch(self, size: int) -> None:
        """Counts temporary bytes."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + size)

    def release(self, tensor: torch.Tensor) -> None:
        """Stops counting a tensor that is counted elsewhere from now on."""
        key = id(tensor.untyped_storage())
        self.live_bytes -= self._bytes_of.get(key, 0)
        self._bytes_of[key] = 0

    def _drop(self, key: int) -> None:
        self.live_bytes -= self._bytes_of.pop(key, 0)


class Tally:
    """Operators and memory of one forward and one backward.

    Attributes:
        phases: Operators of forward and of backward.
        saved: Bytes of storages saved for backward, by id.
    """

    def __init__(self, resident: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor] = ()) -> None:
        resident = list(resident)
        self.memory = LiveMemory([*resident, *inputs])
        self.phases: tuple[list[Operator], list[Operator]] = ([], [])
        self.saved: dict[int, int] = {}
        self.forward_peak_bytes = 0
        self.is_backward = False
        self._resident = {id(tensor.untyped_storage()) for tensor in resident}

    @property
    def operators(self) -> list[Operator]:
        """Operators of the current phase."""
        return self.phases[self.is_backward]

    def save(self, tensor: torch.Tensor) -> None:
        """Counts a tensor saved for backward."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._resident:
            self.saved[id(storage)] = storage.nbytes()
            self.memory.add(tensor)

    def start_backward(self) -> None:
        """Ends the forward."""
        self.forward_peak_bytes = max(self.forward_peak_bytes, self.memory.peak_bytes)
        self.memory.start_phase()
        self.is_backward = True


class Recorder(TorchDispatchMode):
    """Adds every operator that does work to the last of ``tallies``."""

    def __init__(self) -> None:
        super().__init__()
        self.tallies: list[Tally] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tally = self.tallies[-1]
        if isinstance(func, torch._ops.OpOverload) and func.namespace != "prim":
            operator = describe(func, args, kwargs, result)
            if operator is not None:
                tally.operators.append(operator)
            for tensor in tensors_of(result):
                tally.memory.add(tensor)
        return result

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Saved-tensor hook."""
        self.tallies[-1].save(tensor)
        return tensor
