"""Floating-point operations of operators that are bound by the memory: so many an element is enough."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

_PER_ELEMENT = {
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"), 8),
    **dict.fromkeys(("cudnn_batch_norm", "batch_norm", "batch_norm_with_update", "_fused_rms_norm"), 8),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "logsumexp"), 5),
    **dict.fromkeys(("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"), 10),
    **dict.fromkeys(("sort", "topk", "argsort"), 20),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin"), 1),
    **dict.fromkeys(("cumsum", "cumprod", "norm", "linalg_vector_norm", "dist"), 2),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), 4),
    **dict.fromkeys(("nll_loss", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "huber_loss", "glu"), 2),
    **dict.fromkeys(
        ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d"), 4
    ),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"), 1),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa"), 8),
    **dict.fromkeys(
        ("native_dropout", "bernoulli", "uniform", "normal", "rand", "randn", "rand_like", "randn_like"), 2
    ),
    **dict.fromkeys(("randint", "randperm", "exponential", "multinomial", "random"), 2),
    **dict.fromkeys(("nll_loss2d", "softplus", "hardtanh", "leaky_relu", "elu", "gelu", "silu", "prelu", "_prelu"), 4),
    **dict.fromkeys(("index_add", "scatter_add", "scatter_reduce", "embedding_dense", "_embedding_bag"), 1),
    **dict.fromkeys(("_foreach_add", "_foreach_mul", "native_norm", "lerp", "addcmul", "addcdiv", "cross"), 2),
}
"""Operations for each element of the larger of input and output; a backward takes twice that."""

_MOVES = frozenset(
    name
    for line in (
        "_cudnn_rnn_flatten_weight _index_put_impl _pack_padded_sequence _to_copy _unsafe_index _unsafe_index_put",
        "arange as_strided bucketize cat channel_shuffle clone col2im constant_pad_nd copy diagonal embedding eye",
        "fill flip full full_like gather im2col index index_copy index_fill index_put index_select lift_fresh_copy",
        "linspace masked_fill masked_scatter new_full new_ones new_zeros one_hot ones ones_like pad pixel_shuffle",
        "pixel_unshuffle reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad2d resize roll",
        "rot90 scalar_tensor scatter searchsorted select select_scatter set_ slice slice_scatter",
        "split_with_sizes_copy stack take tril triu unfold unfold_copy value_selecting_reduction view_copy where",
        "zero zeros zeros_like",
    )
    for name in line.split()
)
"""Operators that only move data."""


def elementwise_flops(func: Any, name: str, tensors: Any) -> int | None:
    """Returns the operations of a call that is no matrix product; None for an operator that is not known.

    Args:
        func: The operator.
        name: Its short name.
        tensors: Its arguments and results, nested.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    elements = max((leaf.numel() for leaf in leaves), default=0)
    base = name.removesuffix("_data").removesuffix("_backward")
    times = 2 if base != name else 1
    if base in _PER_ELEMENT:
        return times * _PER_ELEMENT[base] * elements
    if base in _MOVES or name in _MOVES:
        return 0
    if torch.Tag.pointwise in func.tags or torch.Tag.reduction in func.tags:
        return times * elements
    return None
