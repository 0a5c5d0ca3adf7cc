"""Counting in mixed precision: what is cast, what that moves, and which bytes stay in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from analytic_cases import ATTENTION, MATMUL, encoder
from torch import nn

from mosaic.cost.counting import CudaFunctions, count_module
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


def test_a_weight_that_is_used_twice_is_cast_once_as_torch_does():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.inner(self.inner(x))

    counts = count_module(Twice(), (torch.randn(3, 8),), autocast=BF16)
    casts = [operator for operator in counts.forward.operators if operator.name == "aten._to_copy"]
    assert sorted(operator.written_bytes for operator in casts) == [2 * 3 * 8, 2 * 8 * 8]


def test_what_functions_of_torch_call_inside_is_cast_too():
    for batch_first in (True, False):
        module = nn.MultiheadAttention(32, 4, batch_first=batch_first)
        given = torch.randn(2, 5, 32, requires_grad=True)
        counts = count_module(module, (given, given, given), {"need_weights": False}, autocast=BF16)
        assert dtypes_of(counts.forward, MATMUL) == dtypes_of(counts.forward, ATTENTION) == {"bfloat16"}
        assert "aten._scaled_dot_product_flash_attention" in {o.name for o in counts.forward.operators}


def test_norms_and_losses_run_in_float32():
    with CudaFunctions(BF16):
        x = F.linear(torch.randn(2, 8), torch.randn(8, 8))
        assert x.dtype == BF16
        assert F.layer_norm(x, (8,)).dtype == torch.float32
        assert F.cross_entropy(x, torch.zeros(2, dtype=torch.long)).dtype == torch.float32
        assert (x + x).dtype == BF16
        assert torch.randn(2, 8).double().matmul(torch.randn(8, 2).double()).dtype == torch.float64


@pytest.mark.parametrize("target", ["cuda", "host"])
def test_mixed_precision_moves_and_keeps_fewer_bytes(target: str):
    module, given = encoder(), torch.randn(16, 64, 32, requires_grad=True)
    full, mixed = (count_module(module, (given,), target=target, autocast=of) for of in (None, BF16))
    assert mixed.memory.resident_bytes == full.memory.resident_bytes
    assert mixed.memory.activation_bytes < full.memory.activation_bytes
    assert mixed.forward.kernels > full.forward.kernels
    assert sum(o.flops * o.calls for o in mixed.forward.of_kind(MATMUL)) == sum(
        o.flops * o.calls for o in full.forward.of_kind(MATMUL)
    )
