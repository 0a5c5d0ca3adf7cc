"""The table of torch functions: what each does with the tensors that it is given, on the host and on streams."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mosaic.find.structure import tensors_in, version_of
from mosaic.find.trace import name_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READS = _words(
    """
    __get__:shape __get__:dtype __get__:device __get__:layout __get__:ndim __get__:requires_grad __get__:is_leaf
    __get__:grad_fn __get__:grad __get__:_version __get__:is_cuda __get__:is_cpu __get__:is_sparse __get__:is_meta
    __get__:is_quantized __get__:is_nested __get__:is_mkldnn __get__:itemsize __get__:nbytes __get__:output_nr
    __get__:retains_grad __get__:names __get__:is_xla __get__:is_mps __get__:is_xpu __get__:_backward_hooks
    __get__:_post_accumulate_grad_hooks __get__:is_sparse_csr __get__:is_mtia __get__:is_ipu __get__:is_maia
    size dim stride numel nelement element_size is_floating_point is_complex is_signed is_contiguous
    get_device ndimension __len__ __hash__ register_hook register_post_accumulate_grad_hook retain_grad is_inference
    has_names _is_view is_same_size result_type dim_order is_conj is_neg is_distributed is_pinned record_stream
    """
)
"""Reads what belongs to the tensor object, and no value."""
_SETS = _words("__set__:requires_grad __set__:grad __set__:_backward_hooks requires_grad_")
"""Sets what belongs to the tensor object."""
_VALUES = _words(
    """
    numpy tolist item __array__ __array_wrap__ data_ptr untyped_storage storage _typed_storage __dlpack__
    __dlpack_device__ __repr__ __str__ __format__ __bool__ __int__ __float__ __index__ __complex__ is_nonzero
    __contains__ backward __reduce_ex__ __deepcopy__ pin_memory is_shared share_memory_ __dir__ set_ detach_
    __get__:__cuda_array_interface__ cpu grad
    """
)
"""Needs values or memory, or changes what memory a tensor stands for."""
_FOLLOWS = _words(
    """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ add sub mul div
    true_divide neg square pow sqrt rsqrt exp log abs clamp mean sum var std norm vector_norm normalize
    cosine_similarity linear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm conv1d conv2d conv3d max_pool1d
    max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d layer_norm rms_norm group_norm relu
    gelu silu sigmoid tanh softmax log_softmax leaky_relu elu softplus mse_loss cross_entropy __getitem__ select
    narrow chunk split unbind reshape view flatten unflatten transpose permute unsqueeze squeeze expand repeat __get__:T
    __get__:mT t contiguous clone detach float to cat concat stack
    """
)
"""Follows the tensors of one host lane that has no values as yet: what connects encoders in practice.

Each runs on the lane as a whole, on real tensors. A function that is not listed waits for its inputs and runs where it
is called.
"""
_IN_PLACE = _words(
    """
    __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __imatmul__ __iand__ __ior__ __ixor__
    __ilshift__ __irshift__ __idiv__ __setitem__
    """
)
"""Writes into its first argument, as does each function whose name ends with ``_``."""
_STATISTICS = _words(
    "batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats"
)
"""May write into running statistics, which neither its schema nor torch's count of versions tells."""
_MOVES = _words("to type type_as")
"""May copy to another device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFunction:
    """The effects of a torch function on its tensors."""

    name: str  # of an attribute's getter or setter ``__get__:`` or ``__set__:`` and the attribute's
    reads: bool  # the tensor object, and no value
    sets: bool  # the tensor object
    value: bool  # needs values or memory of a tensor that a stream is computing, or changes what memory that has
    listed: bool  # follows a host lane
    writes: bool  # into its first argument
    writes_any: bool  # its schema has it write into some argument
    statistics: bool  # may write into running statistics
    inplace: int | None  # the position of a parameter called ``inplace``
    may_write: bool  # into an argument, apart from ``out``
    is_pure: bool  # reads its arguments, and makes new tensors and views
    moves: bool  # may copy to another device

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        targets = [] if "out" not in kwargs else tensors_in(kwargs["out"])
        if self.writes_any:
            return [*targets, *tensors_in((args, kwargs))]
        at = self.inplace
        if self.writes or (at is not None and kwargs.get("inplace", args[at] if len(args) > at else False)):
            targets += tensors_in(args[0] if args else kwargs.get("input"))
        return targets

    def replaces(self, kwargs: dict[str, Any]) -> bool:
        """Returns True if a call writes into a tensor or sets a part of one, as far as its name and ``out`` tell."""
        return self.writes or kwargs.get("out") is not None or self.name.startswith("__set__")

    def follows_lane(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if a call may run on tensors of one host lane that have no values as yet.

        A tensor among indices may select any number of elements.
        """
        selects = self.name == "__getitem__" and tensors_in(args[1:])
        return self.listed and not selects and not any(map(may_change, tensors_in((args, kwargs))))

    def moves_elsewhere(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
        """Returns True if a call may copy to another device, which the host could take for work of its own stream."""
        return self.moves and any(_is_elsewhere(value, device) for value in (*args[1:], *kwargs.values()))


@lru_cache(maxsize=4096)
def look_up(func: Callable[..., Any]) -> TorchFunction:
    name, writes_any, inplace = name_of(func), _schema_writes(func), _inplace_position(func)
    sets, writes = name in _SETS, name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    may_write = writes or writes_any or inplace is not None
    return TorchFunction(
        name=name,
        reads=name in _READS,
        sets=sets,
        value=name in _VALUES or (name.startswith("__set__") and not sets),
        listed=name in _FOLLOWS,
        writes=writes,
        writes_any=writes_any,
        statistics=name in _STATISTICS,
        inplace=inplace,
        may_write=may_write,
        is_pure=name in _FOLLOWS and not may_write and name not in _MOVES,
        moves=name in _MOVES,
    )


def may_change(tensor: torch.Tensor) -> bool:
    """Returns True for what was written to before, as buffers are, and may be again while a lane reads it."""
    return type(tensor) is torch.Tensor and not tensor.requires_grad and bool(version_of(tensor))


def _is_elsewhere(value: Any, device: torch.device) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device != device
    if isinstance(value, (torch.device, str)):
        return torch.device(value).type != device.type if not str(value).startswith("torch.") else False
    return isinstance(value, int) and not isinstance(value, bool)


def _schema_writes(func: Any) -> bool:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    if isinstance(func, torch._ops.OpOverloadPacket):
        return any(getattr(func, overload)._schema.is_mutable for overload in func.overloads())
    return False


def _inplace_position(func: Any) -> int | None:
    if not inspect.isfunction(func):
        return None
    names = list(inspect.signature(func, follow_wrapped=False).parameters)
    return names.index("inplace") if "inplace" in names else None


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name not in type(tensor).__annotations__}
