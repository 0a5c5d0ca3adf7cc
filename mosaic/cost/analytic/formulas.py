"""Floating-point operations, kind and matrix shapes of torch's operators.

Matrix products, convolutions and attention follow ``torch.utils.flop_counter``, with what it lacks added here, and
halved for causal attention, whose kernels skip the masked half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from mosaic.cost.analytic.elementwise import elementwise_flops
from mosaic.cost.counts import Gemm, OperatorKind

_ATTENTION = (
    "_scaled_dot_product_",
    "_flash_attention_",
    "_efficient_attention_",
    "flex_attention",
)
_CONV = ("convolution", "cudnn_convolution", "_slow_conv", "_convolution", "mkldnn_convolution")
_NETWORK = ("_c10d_functional", "c10d", "c10d_functional", "_dtensor")


def bound_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operator's call by the names in its schema."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def short_name(func: Any) -> str:
    """Returns an operator's name without namespace, overload and the mark of an in-place form."""
    name: str = func._schema.name.split("::")[-1]
    return name.removesuffix("_") if len(name) > 1 and not name.startswith("__") else name


def kind_of(func: Any) -> OperatorKind:
    """Returns what an operator is bound by."""
    name = short_name(func)
    if func.namespace in _NETWORK:
        return OperatorKind.NETWORK
    if name.startswith(_ATTENTION):
        return OperatorKind.ATTENTION
    if name.startswith(_CONV):
        return OperatorKind.CONV
    if func._overloadpacket in flop_registry or name in _MATMULS:
        return OperatorKind.MATMUL
    return OperatorKind.MEMORY


def count_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int | None:
    """Returns the floating-point operations of a call; None for an operator that is not known."""
    formula = flop_registry.get(func._overloadpacket)
    name = short_name(func)
    given = bound_arguments(func, args, kwargs)
    if formula is not None and not _has_grouped_queries(name, given):
        counted: int = formula(*args, **kwargs, out_val=result)
        return counted // 2 if given.get("is_causal", given.get("causal")) is True else counted
    if name in _MATMULS or _has_grouped_queries(name, given):
        own: int = _MATMULS[name](given) if name in _MATMULS else _attention(given, 5 if "backward" in name else 2)
        return own // 2 if given.get("is_causal") is True else own
    if func.namespace in _NETWORK:
        return 0
    return elementwise_flops(func, name, (args, kwargs, result))


def gemm_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Gemm | None:
    """Returns the shape of an operator's matrix products; None where it has none or they are not known."""
    given = bound_arguments(func, args, kwargs)
    name = short_name(func)
    if name in ("mm", "addmm", "_int_mm", "_scaled_mm"):
        left, right = (given["mat1"], given["mat2"]) if name == "addmm" else (given["self"], given["mat2"])
        return Gemm(m=left.shape[0], n=right.shape[1], k=left.shape[1])
    if name in ("bmm", "baddbmm"):
        left, right = (given["batch1"], given["batch2"]) if name == "baddbmm" else (given["self"], given["mat2"])
        return Gemm(batch=max(1, left.shape[0]), m=left.shape[1], n=right.shape[2], k=left.shape[2])
    if name.startswith("_scaled_dot_product_"):
        query, value = given["query"], given["value"]
        return Gemm(batch=max(1, query.shape[0] * query.shape[1]), m=query.shape[2], n=value.shape[3], k=0)
    if name == "convolution":
        return _conv_gemm(result, given["weight"], given, 1)
    if name == "convolution_backward":
        products = int(given["output_mask"][0]) + int(given["output_mask"][1])
        return _conv_gemm(given["grad_output"], given["weight"], given, products) if products else None
    return None


def _conv_gemm(output: torch.Tensor, weight: torch.Tensor, given: dict[str, Any], products: int) -> Gemm:
    """The implicit product of a convolution: output positions by output channels; both gradients count as such."""
    groups = given["groups"]
    channels = output.shape[1] // groups
    length = weight.numel() // max(1, groups * channels)
    positions = output.shape[0] * math.prod(output.shape[2:])
    return Gemm(batch=groups * products, m=positions, n=channels, k=length)


def count_kernels(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Returns the kernels of a call: one, but for the operators that launch several."""
    name = short_name(func)
    if name == "convolution_backward":  # gradients of input, weight and bias are kernels of their own
        return max(1, sum(map(bool, bound_arguments(func, args, kwargs)["output_mask"])))
    return _KERNELS.get(name, 1)


_KERNELS = {
    # torch's CUDA kernels, as their sources launch them
    "native_layer_norm_backward": 2,  # the input's gradient, then those of weight and bias
    "native_group_norm": 2,
    "native_group_norm_backward": 3,
    "embedding_dense_backward": 2,  # zeros, then the sums
    "select_backward": 2,  # zeros, then a copy
    "slice_backward": 2,
    "index_put": 2,
    "_flash_attention_backward": 3,  # row sums, the main kernel, conversion of the query's gradient
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
    "sort": 4,
    "topk": 2,
}


def _has_grouped_queries(name: str, given: dict[str, Any]) -> bool:
    """Whether several heads of a query share keys and values, which torch 2.11 cannot count."""
    return name.startswith("_scaled_dot_product_") and bool(given["query"].shape[1] != given["key"].shape[1])


def _attention(given: dict[str, Any], products: float) -> int:
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, length, width = query.shape
    pairs = batch * heads * length * key.shape[2]
    return int(products * pairs * (int(width) + int(value.shape[3])))


def _recurrent(given: dict[str, Any], weights: Sequence[str]) -> int:
    steps = given["input"].shape[0] * given["input"].shape[1]
    elements: int = sum(given[name].numel() for name in weights)
    return 2 * int(steps) * elements


_MATMULS = {
    # five products in the backward of fused attention where the forward has two
    "_scaled_dot_product_flash_attention_for_cpu": lambda given: _attention(given, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda given: _attention(given, 5),
    "mkldnn_rnn_layer": lambda given: _recurrent(given, ("weight0", "weight1")),
    "mkldnn_rnn_layer_backward": lambda given: 2 * _recurrent(given, ("weight1", "weight2")),
    "mv": lambda given: 2 * given["self"].numel(),
    "addmv": lambda given: 2 * given["mat"].numel(),
    "dot": lambda given: 2 * given["self"].numel(),
    "addr": lambda given: 2 * given["vec1"].numel() * given["vec2"].numel(),
    "_int_mm": lambda given: 2 * given["self"].numel() * given["mat2"].shape[1],
}
