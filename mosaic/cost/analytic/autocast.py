"""What CUDA's autocast casts, done on tensors of any device: on the CPU torch casts others, on meta none."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_LOW = frozenset(
    name
    for line in (
        "__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d",
        "conv_transpose1d conv_transpose2d conv_transpose3d einsum gru gru_cell linear lstm lstm_cell matmul mm",
        "multi_dot mv prelu rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention",
    )
    for name in line.split()
)
_FULL = frozenset(
    name
    for line in (
        "__pow__ __rpow__ binary_cross_entropy_with_logits cdist cosine_embedding_loss cosine_similarity cross_entropy",
        "cumprod cumsum dist exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2",
        "log_softmax mse_loss multi_margin_loss nll_loss norm normalize pow prod reciprocal renorm rsqrt",
        "smooth_l1_loss soft_margin_loss softmax softmin softplus sum triplet_margin_loss",
    )
    for name in line.split()
)
"""Functions that run in 16 and in 32 bits (torch's documentation, "Automatic Mixed Precision", CUDA op reference)."""


class CudaAutocast(TorchFunctionMode):
    """Casts to bfloat16 and to float32 where CUDA's autocast does; a weight once in the life of this object.

    Attributes:
        dtype: What it casts to.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def casts(self) -> tuple[torch.Tensor, ...]:
        """The casts of weights that it keeps."""
        return tuple(cast for _, cast in self._casts.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Casts and calls."""
        args, kwargs = self.cast(func, args, kwargs or {})
        return func(*args, **kwargs)

    def cast(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of a call as autocast hands them on."""
        name = getattr(func, "__name__", "")
        wanted = self.dtype if name in _LOW else torch.float32 if name in _FULL else None
        if wanted is None or kwargs.get("dtype") is not None:
            return args, kwargs
        cast: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, lambda t: self._cast(t, wanted), (args, kwargs))
        return cast

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) or tensor.dtype == dtype:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return self._casts[id(tensor)][1]
