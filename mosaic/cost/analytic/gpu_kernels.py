"""Making a call on fake CPU tensors take the operators that a GPU would take, where the two differ much."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mosaic.cost.analytic.autocast import CudaAutocast

_RECURRENT = frozenset(("gru", "lstm", "rnn_tanh", "rnn_relu"))
_HALF = (torch.float16, torch.bfloat16)


class GpuKernels(TorchFunctionMode):
    """Chooses as torch does on CUDA devices from compute capability 8.0 on.

    Attention takes the flash kernel in 16 bits without a mask and the memory-efficient one otherwise; a CPU would
    write the whole matrix of scores wherever there is dropout. Dropout is one kernel. A recurrent layer is one call
    into cuDNN, whose element-wise work rides on its matrix products: of that, only the arithmetic is counted.

    Args:
        autocast: Casts arguments first; here and not as a mode of its own, so that it sees what functions call inside.
    """

    def __init__(self, autocast: CudaAutocast | None = None) -> None:
        super().__init__()
        self._autocast = autocast
        self._inside = False
        self._sequences: list[tuple[int, int]] = []

    def in_recurrent_call(self) -> bool:
        """Returns whether the operator at hand belongs to a recurrent layer, in forward or in backward."""
        if self._inside:
            return True
        node = torch._C._current_autograd_node()
        if node is None:
            return False
        number = node._sequence_nr()
        return any(first <= number < last for first, last in self._sequences)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces attention, and notes where recurrent layers begin and end."""
        kwargs = kwargs or {}
        if self._autocast is not None:
            args, kwargs = self._autocast.cast(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _RECURRENT and not self._inside:
            return self._recurrent(func, args, kwargs)
        if isinstance(func, FunctionType) and (func.__globals__ is vars(F) or func is torch.autograd.backward):
            with self:  # so that what the function calls is seen as well, and what checkpoints run again
                return _without_checks(func)(*args, **kwargs)
        if name == "dropout" and len(args) == 3 and args[2] and args[1] > 0:
            return torch.native_dropout(*args)[0]
        return func(*args, **kwargs)

    def _recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        first, enabled = torch._C._autograd._get_sequence_nr(), torch._C._get_mkldnn_enabled()
        self._inside = True
        try:
            torch._C._set_mkldnn_enabled(False)  # the step-by-step form
            return func(*args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(enabled)
            self._inside = False
            self._sequences.append((first, torch._C._autograd._get_sequence_nr()))


@cache
def _without_checks(func: FunctionType) -> FunctionType:
    """Returns a copy of one of torch's Python functions that runs its body instead of asking modes first."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    unchecked = func.__globals__ | dict.fromkeys(names, lambda *_: False)
    made = FunctionType(func.__code__, unchecked, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _attention(
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
    if query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and query.dtype in _HALF:
        flash: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return flash
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    wants_gradient = any(tensor.requires_grad for tensor in (query, key, value))
    efficient: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, wants_gradient, dropout_p, is_causal, scale=scale
    )[0]
    return efficient
