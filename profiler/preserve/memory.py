"""The tensors that a model reaches: copies of what is small or about to be written, and the way back.

Parameters are too large to be copied each time. A ``WriteWatch`` sees each operator of this thread that says what it
writes, and copies the memory of the model just before; what other threads write, and what writes without saying so
(numpy on the same memory, kernels unknown to torch), shows in a sum over the memory and cannot be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from mosaic.errors import UnsupportedModelError
from mosaic.profiler.preserve.kinds import CannotPutBackError
from mosaic.profiler.preserve.reach import Where, path_of

MAX_SMALL_BYTES = 1 << 16
"""A copy of so much takes no longer than a sum over it."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_RUNNING_STATISTICS = ("running_mean", "running_var")
"""Arguments that normalizations write into, which their schemas do not say."""


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, nobody watches the operators of this thread, and nothing is recorded."""
    recorded = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        torch._C._set_grad_enabled(False)
        try:
            yield
        finally:
            torch._C._set_grad_enabled(recorded)


class _Piece:
    """The memory of one tensor, as bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        storage = tensor.untyped_storage()
        self.key: int = storage._cdata
        self.start = int(tensor.storage_offset()) * size
        self.end = self.start + int(span) * size
        self.bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.bytes.set_(storage, self.start, (span * size,))  # type: ignore[call-overload]
        self.copy: torch.Tensor | None = None
        self.sum: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def save(self) -> None:
        if self.copy is None:
            self.copy = self.bytes.clone()

    @_unseen()
    def put_back(self) -> None:
        if self.copy is not None:
            if not torch.equal(self.bytes, self.copy):
                self.bytes.copy_(self.copy)
        elif self.sum is not None and not torch.equal(self.sum, _sum_of(self.bytes)):
            raise CannotPutBackError(
                "its values were changed by something that torch did not show before (another thread, numpy, or what "
                "happens in some calls only), so that no copy was made: load the model's weights again, and keep the "
                "module that writes it where it is called (exclude=...), or let it write with torch's operators"
            )


class _Kept:
    """What one tensor was."""

    def __init__(self, tensor: torch.Tensor, where: Where) -> None:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise UnsupportedModelError(
                f"{path_of(where)} has no shape yet; call the model once before it is colocated"
            )
        self.tensor, self.where = tensor, where
        self.alias = tensor if is_traceable_wrapper_subclass(tensor) else tensor.detach()  # lives on if it is replaced
        self.is_leaf, self.requires_grad = tensor.is_leaf, tensor.requires_grad
        self.grad = tensor.grad if self.is_leaf else None
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) if self.is_leaf else None
        self.hooks: dict[Any, Any] = dict(hooks or {})  # called once a gradient has been added: an optimizer's step
        self.pieces = [_Piece(plain) for plain in _plain_tensors(tensor)]

    def set_gradient_aside(self) -> None:
        if self.is_leaf:
            self.tensor.grad = None
            if self.hooks:
                self.tensor._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]

    @_unseen()
    def put_back(self) -> None:
        tensor = self.tensor
        if self.is_leaf:
            if not tensor.is_leaf:
                tensor.detach_()
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
        if _layout_of(tensor) != _layout_of(self.alias):
            tensor.data = self.alias
        if self.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad
        if self.hooks:
            tensor._post_accumulate_grad_hooks.update(self.hooks)  # type: ignore[attr-defined]


class Memory:
    """Tensors as they were.

    Args:
        tensors: Where they were reached.
        buffers: Ids of those that are always copied.
        written: ``Memory.written`` of an earlier run.
        limit_bytes: If all tensors together are smaller, all are copied.

    Attributes:
        written: The storages that were seen to be written.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[torch.Tensor, Where]],
        *,
        buffers: Collection[int],
        written: Collection[int],
        limit_bytes: int,
    ) -> None:
        self.written: set[int] = set(written)
        self._by_storage: dict[int, list[_Piece]] = {}
        with _unseen():
            self._kept = [_Kept(tensor, where) for tensor, where in tensors]
            is_small = sum(piece.num_bytes for kept in self._kept for piece in kept.pieces) <= limit_bytes
            for kept in self._kept:
                is_copied = is_small or id(kept.tensor) in buffers
                for piece in kept.pieces:
                    self._by_storage.setdefault(piece.key, []).append(piece)
                    if is_copied or piece.num_bytes <= MAX_SMALL_BYTES or piece.key in self.written:
                        piece.save()
                    else:
                        piece.sum = _sum_of(piece.bytes)

    def set_gradients_aside(self) -> None:
        """Leaves every tensor without a gradient, and without what is to be done when it gets one."""
        for kept in self._kept:
            kept.set_gradient_aside()

    def before_write(self, value: Any) -> None:
        """Copies what the tensors in ``value`` have in common with those of the model."""
        if isinstance(value, (list, tuple)):
            for item in value:
                self.before_write(item)
        elif isinstance(value, torch.Tensor):
            with _unseen():
                for plain in _plain_tensors(value):
                    storage = plain.untyped_storage()._cdata
                    if storage in self._by_storage:
                        self.written.add(storage)
                        span = _Piece(plain)
                        for piece in self._by_storage[storage]:
                            if piece.start < span.end and span.start < piece.end:
                                piece.save()

    def steps_back(self) -> Iterator[tuple[Where, Callable[[], None]]]:
        """Yields for each tensor where it was reached and what puts it back."""
        for kept in self._kept:
            yield kept.where, kept.put_back
            for piece in kept.pieces:
                yield kept.where, piece.put_back


class WriteWatch(TorchDispatchMode):
    """Copies tensors of the model before this thread's operators write into them."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets what the model compiles itself be compiled."""
        return True

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._writes: dict[Any, tuple[tuple[int, str], ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is None:  # nobody knows
            self._memory.before_write((*args, *kwargs.values()))
            return func(*args, **kwargs)
        writes = self._writes.get(func)
        if writes is None:
            writes = self._writes[func] = tuple(
                (index, argument.name)
                for index, argument in enumerate(schema.arguments)
                if (argument.alias_info is not None and argument.alias_info.is_write)
                or argument.name in _RUNNING_STATISTICS
            )
        for index, name in writes:
            self._memory.before_write(args[index] if index < len(args) else kwargs.get(name))
        return func(*args, **kwargs)


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common that are over the same memory in the same way."""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in _plain_tensors(tensor)]
    return tensor.dtype, tensor.shape, tensor.device, places


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors with memory of their own that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):
                yield from _plain_tensors(inner)
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield tensor.values()
    elif tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel() and not tensor.is_nested:
        yield tensor


def _sum_of(memory: torch.Tensor) -> torch.Tensor:
    """Returns a sum over bytes that hardly any change leaves as it was."""
    first = -memory.storage_offset() % 8
    end = first + (memory.numel() - first) // 8 * 8
    rest = torch.cat([memory[:first], memory[end:]]).sum(dtype=torch.int64)
    return rest + memory[first:end].view(torch.int64).sum()
