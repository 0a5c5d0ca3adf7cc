"""A GPU's operators and dtypes for calls on fake CPU tensors."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_LOW = frozenset(
    name
    for line in (
        "__matmul__ __rmatmul__ addbmm addmm addmv baddbmm bilinear bmm conv1d conv2d conv3d conv_transpose1d",
        "conv_transpose2d conv_transpose3d einsum gru linear lstm matmul mm mv prelu scaled_dot_product_attention",
    )
    for name in line.split()
)
_FULL = frozenset(
    name
    for line in (
        "__pow__ cosine_embedding_loss cosine_similarity cross_entropy cumsum exp group_norm kl_div l1_loss layer_norm",
        "log log_softmax mse_loss nll_loss norm normalize pow prod reciprocal rsqrt smooth_l1_loss softmax sum",
    )
    for name in line.split()
)
"""Functions that autocast runs in 16 and in 32 bits (torch, "Automatic Mixed Precision", CUDA op reference)."""


class CudaFunctions(TorchFunctionMode):
    """Runs attention and dropout as fused kernels, with the casts of CUDA's autocast.

    Torch's autocast ignores meta tensors, and on a CPU attention with dropout writes the whole score matrix. Recurrent
    layers are counted step by step.

    Args:
        dtype: Target dtype of autocast; None: no casts. A weight is cast once per instance.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        dtype = self._dtype if name in _LOW else torch.float32 if name in _FULL else None
        if self._dtype is not None and dtype is not None and kwargs.get("dtype") is None:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: self._cast(t, dtype), (args, kwargs))
        if func is F.scaled_dot_product_attention:
            return fused_attention(*args, **kwargs)
        if name == "dropout" and len(args) == 3 and args[2] and args[1] > 0:
            return torch.native_dropout(*args)[0]
        if isinstance(func, FunctionType) and (func.__globals__ is vars(F) or func is torch.autograd.backward):
            with self:  # also covers functions inside the call and recomputed checkpoints
                return _without_checks(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) or tensor.dtype == dtype:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return self._casts[id(tensor)][1]


@cache
def _without_checks(func: FunctionType) -> FunctionType:
    """Returns a copy of one of torch's Python functions that does not dispatch to modes."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    namespace = func.__globals__ | dict.fromkeys(names, lambda *_: False)
    function = FunctionType(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    function.__kwdefaults__ = func.__kwdefaults__
    return function


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with the kernels of compute capability 8.0 and newer.

    The flash kernel in 16 bits without a mask, otherwise the memory-efficient one.
    """
    if query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return flash
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    is_trained = any(tensor.requires_grad for tensor in (query, key, value))
    efficient: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, is_trained, dropout_p, is_causal, scale=scale
    )[0]
    return efficient
