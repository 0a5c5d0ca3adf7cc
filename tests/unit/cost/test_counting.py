"""Operators, bytes and memory of modules, against what a pencil finds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from analytic_cases import ATTENTION, CONV, MATMUL, encoder, flops_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mosaic.cost.counting import LayerCounts, count_degrees, count_module
from mosaic.cost.counts import ModuleCounts, PhaseCounts
from mosaic.errors import UnsupportedModelError


def linear_counts(*, frozen: bool = False, input_gradient: bool = True) -> ModuleCounts:
    module = nn.Linear(8, 4, bias=False).requires_grad_(not frozen)
    return count_module(module, (torch.randn(3, 8, requires_grad=input_gradient),))


@pytest.mark.parametrize(
    ("frozen", "input_gradient", "times"), [(False, True, 2), (True, True, 1), (False, False, 1), (True, False, 0)]
)
def test_the_backward_of_a_linear_layer_is_a_product_for_each_gradient(frozen: bool, input_gradient: bool, times: int):
    counts = linear_counts(frozen=frozen, input_gradient=input_gradient)
    assert flops_of(counts.backward, MATMUL) == times * counts.forward.flops
    assert counts.memory.gradient_bytes == (0 if frozen else 4 * 8 * 4)
    assert times > 0 or (counts.backward, counts.memory.activation_bytes) == (PhaseCounts(), 0)
    assert counts.memory.optimizer_bytes == 2 * counts.memory.gradient_bytes


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, **self.options)


def heads(length: int = 16, dtype: torch.dtype = torch.bfloat16, num: int = 4) -> torch.Tensor:
    return torch.randn(2, num, length, 8, dtype=dtype, requires_grad=True)


def test_attention_is_one_fused_kernel_that_does_not_write_the_scores():
    counts = count_module(Attention(), (heads(), heads(), heads()))
    assert counts.forward.flops == 2 * 2 * (2 * 4) * 16 * 16 * 8
    assert counts.forward.kernels == 1
    assert {operator.name for operator in counts.forward.operators} == {"aten._scaled_dot_product_flash_attention"}
    # query, key, value and result in two bytes, and a float32 for each row
    assert 4 * 2 * 1024 <= counts.forward.moved_bytes <= 4 * 2 * 1024 + 4 * 128 + 64
    assert flops_of(counts.backward, ATTENTION) == counts.forward.flops * 5 // 2
    causal = count_module(Attention(is_causal=True), (heads(), heads(), heads()))
    assert causal.forward.flops * 2 == counts.forward.flops


def test_writing_in_place_reads_only_where_the_old_value_counts():
    class Writes(nn.Module):
        def forward(self, x):
            made = torch.empty(100)
            made.fill_(1.0)
            return made.add_(x)

    counts = count_module(Writes(), (torch.randn(100),))
    moved = {operator.name: (operator.read_bytes, operator.written_bytes) for operator in counts.forward.operators}
    assert moved == {"aten.fill_": (0, 400), "aten.add_": (800, 400)}


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (3, 8)),
        (nn.Sequential(nn.Conv1d(3, 4, 3, stride=2, groups=1), nn.ReLU(), nn.Conv1d(4, 4, 3, groups=2)), (2, 3, 32)),
        (nn.ConvTranspose2d(3, 4, 2, stride=2), (2, 3, 5, 5)),
        (nn.Bilinear(4, 5, 6), None),
    ],
)
def test_products_and_convolutions_agree_with_torchs_own_counter(module: nn.Module, shape):
    given = (torch.randn(2, 4), torch.randn(2, 5)) if shape is None else (torch.randn(shape),)
    given = tuple(tensor.requires_grad_() for tensor in given)
    with FlopCounterMode(display=False) as counter:
        module(*given).sum().backward()
    counts = count_module(module, given)
    assert flops_of(counts.forward, MATMUL, CONV) + flops_of(counts.backward, MATMUL, CONV) == counter.get_total_flops()


class Block(nn.Module):
    def __init__(self, rate: float = 0.0):
        super().__init__()
        self.body, self.drop = encoder(dropout=0.0), nn.Dropout(rate)
        self.layer_idx = torch.randint(1000, ()).item()
        self.calls = 0

    def forward(self, x, mask=None):
        return self.drop(self.body(x)) if mask is None else (self.body(x) * mask, mask)


class Stacked(nn.Module):
    """The same blocks in a list that layers are taken from, or as attributes, which are counted one by one."""

    def __init__(self, blocks: list[nn.Module], *, is_list: bool, recompute: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(blocks) if is_list else nn.ModuleDict({str(i): b for i, b in enumerate(blocks)})
        self.head, self.recompute = nn.Linear(32, 8), recompute

    def forward(self, x):
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("rates", "recompute", "gradient"),
    [((0.0, 0.0, 0.0, 0.0), False, False), ((0.0, 0.1, 0.1, 0.2), True, True), ((0.0, 0.1, 0.1, 0.2), False, True)],
)
def test_equal_layers_are_counted_once_and_give_the_counts_of_each(rates, recompute: bool, gradient: bool):
    given = (torch.randn(4, 10, 32, requires_grad=gradient),)
    known: LayerCounts = {}
    blocks = [Block(rate) for rate in rates]
    once = count_module(Stacked(blocks, is_list=True, recompute=recompute), given, layers=known)
    each = count_module(Stacked(blocks, is_list=False, recompute=recompute), given)
    assert len(known) > 0
    for phase in ("forward", "backward"):
        ours, theirs = (
            {(o.name, o.dtype, o.flops, o.moved_bytes): o.calls for o in getattr(counts, phase).operators}
            for counts in (once, each)
        )
        assert ours == theirs
    assert once.memory.activation_bytes == each.memory.activation_bytes
    assert once.memory.resident_bytes == each.memory.resident_bytes
    assert once.memory.total_bytes == pytest.approx(each.memory.total_bytes, rel=0.1)


def test_a_models_own_checkpoints_are_recomputed_in_backward():
    given, made = (torch.randn(4, 10, 32, requires_grad=True),), [Block(), Block()]
    plain, again = (count_module(Stacked(made, is_list=False, recompute=flag), given) for flag in (False, True))
    head = count_module(nn.Linear(32, 8), given).forward.flops
    assert again.forward == plain.forward
    assert again.backward.flops == plain.backward.flops + plain.forward.flops - head
    assert again.memory.activation_bytes < plain.memory.activation_bytes


def test_counting_leaves_everything_as_it_was():
    module = encoder()
    given = torch.randn(2, 10, 32)
    state, before = torch.get_rng_state(), {name: tensor.clone() for name, tensor in module.state_dict().items()}
    count_module(module, (given,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.backends.mkldnn.is_available() == torch._C._get_mkldnn_enabled()


def test_a_module_that_looks_at_values_is_refused_with_the_operator(caplog):
    class Looks(nn.Module):
        def forward(self, x):
            return x[x > 0]

    with pytest.raises(UnsupportedModelError, match=r"Looks cannot be counted.*aten\.nonzero.*profile it"):
        count_module(Looks(), (torch.randn(3),))
    with pytest.raises(UnsupportedModelError, match="Linear cannot be counted"):
        count_module(nn.Linear(4, 4), (torch.randn(2, 3),))
    assert not caplog.records  # torch logs what fails without data


def test_each_degree_is_counted_at_its_part_of_the_batch():
    given = (torch.randn(6, 10, 32, requires_grad=True),)
    by_degree = count_degrees(encoder(), given, degrees=(1, 2, 4, 8))
    assert {degree: counts.batch for degree, counts in by_degree.items()} == {1: 6, 2: 3, 4: 2}
    assert by_degree[2].forward.flops * 2 == by_degree[1].forward.flops
    assert by_degree[2].memory.parameter_bytes == by_degree[1].memory.parameter_bytes


def test_memory_is_that_of_the_tensors():
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    module[0].bias.requires_grad_(False)
    given = torch.randn(32, 8)
    memory = count_module(module, (given,)).memory
    assert memory.parameter_bytes == sum(parameter.nbytes for parameter in module.parameters())
    assert memory.buffer_bytes == sum(buffer.nbytes for buffer in module.buffers())
    assert memory.gradient_bytes == sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert memory.optimizer_bytes == 2 * memory.gradient_bytes
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
