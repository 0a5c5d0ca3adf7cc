"""Small modules and sums over counted operators, for the tests of the analytic cost model."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from mosaic.cost.counting import count_degrees
from mosaic.cost.counts import ModuleCounts, OperatorKind, PhaseCounts


def flops_of(phase: PhaseCounts, *kinds: OperatorKind) -> int:
    return sum(operator.flops * operator.calls for operator in phase.of_kind(*kinds))


MATMUL, ATTENTION, CONV, MEMORY = (
    OperatorKind.MATMUL,
    OperatorKind.ATTENTION,
    OperatorKind.CONV,
    OperatorKind.MEMORY,
)


def encoder(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)


def stack(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).bfloat16()


@cache
def pod_counts() -> dict[str, dict[int, ModuleCounts]]:
    with torch.device("meta"):
        modules = {
            "image": (stack(512, 2), torch.empty(64, 196, 512)),
            "audio": (stack(256, 1), torch.empty(64, 300, 256)),
            "text": (stack(256, 1).requires_grad_(False), torch.empty(64, 64, 256)),
            "fusion": (nn.Linear(512, 512).bfloat16(), torch.empty(64, 512, requires_grad=True)),
        }
        return {
            name: count_degrees(module, (given.bfloat16(),), degrees=(1, 2, 8, 32))
            for name, (module, given) in modules.items()
        }
