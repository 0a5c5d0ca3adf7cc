"""Counting in mixed precision: what is cast, what that moves, and which bytes stay in float32."""

from __future__ import annotations

import torch
from analytic_cases import ATTENTION, MATMUL
from torch import nn

from mosaic.cost.counting import count_module
from mosaic.cost.counts import main_dtype

BF16 = torch.bfloat16


def dtypes_of(phase, kind) -> set[str]:
    return {operator.dtype for operator in phase.of_kind(kind)}


def test_products_are_counted_in_16_bits_and_weights_kept_in_32():
    module, given = nn.Linear(8, 4, bias=False), torch.randn(3, 8, requires_grad=True)
    counts = count_module(module, (given,), autocast=BF16)
    assert dtypes_of(counts.forward, MATMUL) == dtypes_of(counts.backward, MATMUL) == {"bfloat16"}
    assert main_dtype([counts]) == "bfloat16"
    memory = counts.memory
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (4 * 32, 4 * 32, 8 * 32)
    # Input and weight are cast by kernels of their own, and both casts are kept for backward.
    assert counts.forward.kernels == 1 + 2
    assert memory.activation_bytes == 2 * (3 * 8 + 32)
    assert main_dtype([count_module(module, (given,))]) == "float32"


def test_what_functions_of_torch_call_inside_is_cast_too():
    for batch_first in (True, False):
        module = nn.MultiheadAttention(32, 4, batch_first=batch_first)
        given = torch.randn(2, 5, 32, requires_grad=True)
        counts = count_module(module, (given, given, given), {"need_weights": False}, autocast=BF16)
        assert dtypes_of(counts.forward, MATMUL) == dtypes_of(counts.forward, ATTENTION) == {"bfloat16"}
        assert "aten._scaled_dot_product_flash_attention" in {o.name for o in counts.forward.operators}
