"""Following the operators of a call: what each reads, writes and computes, and how much memory lives at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.cost.analytic.formulas import count_flops, count_kernels, gemm_of, kind_of, short_name
from mosaic.cost.counts import Operator, OperatorKind

_WRITE_ONLY = frozenset(["copy", "fill", "zero", "uniform", "normal", "bernoulli", "random", "exponential"])
"""In-place operators that do not read what they overwrite."""

_GATHERS = frozenset(["embedding", "index", "index_select", "gather", "take", "_embedding_bag", "_unsafe_index"])
"""Operators that read no more of their first input than they write."""

_SCATTERS = frozenset(
    ["_index_put_impl", "_unsafe_index_put", "index_add", "index_copy", "index_put", "scatter", "scatter_add"]
)
"""In-place operators that write no more of it than the others bring."""


class LiveMemory:
    """Bytes of the storages that are alive, and the most there were.

    Args:
        resident: Tensors that are accounted for elsewhere: parameters and buffers.
    """

    def __init__(self, resident: Iterable[torch.Tensor]) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {id(_storage(tensor)): 0 for tensor in resident}
        self._resident = [_storage(tensor) for tensor in resident]  # so that no id is used again

    def start_phase(self) -> None:
        """Forgets the peak so far."""
        self.peak_bytes = self.live_bytes

    def add(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage until it dies."""
        storage = _storage(tensor)
        key = id(storage)
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._drop, key).atexit = False

    def release(self, tensor: torch.Tensor) -> None:
        """Stops counting a tensor that from now on is accounted for elsewhere."""
        key = id(_storage(tensor))
        self.live_bytes -= self._known.get(key, 0)
        self._known[key] = 0

    def _drop(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key, 0)


class OperatorTrace(TorchDispatchMode):
    """Notes every operator that does work while it is active; views and allocations are free.

    Args:
        memory: Where results are counted.
    """

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.uncounted: dict[str, None] = {}
        self.fused_region: Any = None
        """Says whether the operator at hand is part of a kernel that another one launches."""
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and notes it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and func.namespace != "prim":
            operator = self._describe(func, args, kwargs, result)
            if operator is not None:
                self.operators.append(operator)
        for tensor in _tensors(result):
            self._memory.add(tensor)
        return result

    def _describe(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Operator | None:
        read, written = _traffic(func, args, kwargs, result)
        if written is None or torch.Tag.inplace_view in func.tags or "empty" in short_name(func):
            return None
        if short_name(func) == "wait_tensor":  # of a collective that is counted where it starts
            return None
        kind = kind_of(func)
        flops = count_flops(func, args, kwargs, result)
        name = f"{func.namespace}.{func._schema.name.split('::')[-1]}"
        if flops is None:
            self.uncounted[name] = None
        fused = kind is OperatorKind.MEMORY and self.fused_region is not None and self.fused_region()
        return Operator(
            name=name,
            kind=kind,
            dtype=_dtype(_tensors(result) or _tensors((args, kwargs))),
            flops=flops or 0,
            read_bytes=0 if fused else read,
            written_bytes=0 if fused else written,
            network_bytes=_sent_bytes(func, read) if kind is OperatorKind.NETWORK else 0,
            kernels=0 if fused else count_kernels(func, args, kwargs),
            gemm=gemm_of(func, args, kwargs, result),
        )


def _traffic(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[int, int | None]:
    """Returns the bytes that a call reads and writes; None written for a call that only makes views."""
    name = short_name(func)
    reads: list[int] = []
    overwritten = 0
    changes = False
    arguments = {argument.name: argument for argument in func._schema.arguments}
    sources: set[int] = set()
    given = dict(zip(arguments, args, strict=False)) | kwargs
    for argument, value in given.items():
        for tensor in _tensors(value):
            sources.add(id(_storage(tensor)))
            alias = arguments[argument].alias_info
            if alias is not None and alias.is_write:
                changes = True
                overwritten += num_bytes(tensor)
                if name not in _WRITE_ONLY and not arguments[argument].is_out:
                    reads.append(num_bytes(tensor))
            else:
                reads.append(num_bytes(tensor))
    made = {id(_storage(tensor)): num_bytes(tensor) for tensor in _tensors(result)}
    fresh = sum(size for key, size in made.items() if key not in sources)
    if not changes and not any(key not in sources for key in made):
        return 0, None
    if name in _GATHERS and reads:
        reads[0] = min(reads[0], fresh)
    if name in _SCATTERS and changes and len(reads) > 1:
        overwritten = min(overwritten, sum(reads[1:]))
        reads[0] = overwritten
    return sum(reads), overwritten + fresh


def _sent_bytes(func: Any, given: int) -> int:
    """Returns what a device sends in a collective over many: twice what an all-reduce is given, else once."""
    return 2 * given if "all_reduce" in short_name(func) or "allreduce" in short_name(func) else given


def num_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes that a tensor shows of its storage; an expanded one shows no more than there are."""
    return min(tensor.numel() * tensor.element_size(), _storage(tensor).nbytes())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _dtype(tensors: list[torch.Tensor]) -> str:
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    first = next(iter(floating or tensors), None)
    return "none" if first is None else str(first.dtype).removeprefix("torch.")
