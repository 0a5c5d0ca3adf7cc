"""Memory of modules against that of their tensors, and what checkpoints run again."""

from __future__ import annotations

import torch
from analytic_cases import encoder
from torch import nn
from torch.utils.checkpoint import checkpoint

from mosaic.cost.counting import count_module


def blocks(*, recompute: bool) -> nn.Module:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False) if recompute else self.body(x)

    return nn.Sequential(Block(), Block())


def test_a_models_own_checkpoints_are_recomputed_in_backward():
    given = (torch.randn(3, 8, requires_grad=True),)
    plain, recomputed = (count_module(blocks(recompute=flag), given) for flag in (False, True))
    assert recomputed.forward == plain.forward
    assert recomputed.backward.flops == plain.backward.flops + plain.forward.flops
    assert recomputed.memory.activation_bytes < plain.memory.activation_bytes


def test_memory_is_that_of_the_tensors():
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    module[0].bias.requires_grad_(False)
    given = torch.randn(32, 8)
    memory = count_module(module, (given,)).memory
    assert memory.parameter_bytes == sum(parameter.nbytes for parameter in module.parameters())
    assert memory.buffer_bytes == sum(buffer.nbytes for buffer in module.buffers())
    assert memory.gradient_bytes == sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert memory.optimizer_bytes == 2 * memory.gradient_bytes
    # the input, the linear layer's result, and mean and deviation of 16 channels
    assert memory.activation_bytes == given.nbytes + 32 * 16 * 4 + 2 * 16 * 4
    assert memory.total_bytes == memory.resident_bytes + memory.activation_bytes + memory.workspace_bytes
    assert memory.forward_peak_bytes >= memory.activation_bytes


def test_kept_activations_agree_with_autograds_own():
    module, given = encoder(dropout=0.0), torch.randn(2, 10, 32, requires_grad=True)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(given)
    assert count_module(module, (given,), target="host").memory.activation_bytes == sum(kept.values())
