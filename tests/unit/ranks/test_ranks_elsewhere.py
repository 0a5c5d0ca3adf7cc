"""A stand-in for a tensor of another rank: it is asked for anything but values, and whoever asks for these is told."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mosaic.errors import ModuleContractError
from mosaic.ranks.parameters.elsewhere import Elsewhere, Home, give_up, take_back
from mosaic.ranks.pipeline.handle import stand_for_others

HOME = Home("tower", (1, 2))
REAL = torch.ones(2, 3)


def away() -> nn.Linear:
    """A module whose parameters are on other ranks."""
    module = nn.Linear(3, 2)
    give_up(module, HOME)
    return module


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_cells_are_given_up_and_taken_back(kind: type[nn.RNNBase]):
    cell, given = kind(3, 2), torch.ones(1, 4, 3)
    noted = dict(vars(cell))  # as what ranks compare of a module's attributes
    parameters, values = list(cell.parameters()), copy.deepcopy(cell.state_dict())
    with torch.no_grad():
        expected = cell(given)[0]
    give_up(cell, HOME)
    take_back(cell, lambda name, _: values[name])
    assert torch.equal(cell(given)[0], expected)
    assert all(one is other for one, other in zip(cell.parameters(), parameters, strict=True))
    assert [one() for one in noted["_flat_weight_refs"]] == parameters
    names = list(values)
    away = kind(3, 2, device="meta")
    stand_for_others(away, SimpleNamespace(all_gather=lambda mine: [mine, names]))
    assert all(isinstance(one, Elsewhere) for one in away.parameters())


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "item": lambda m: m.weight.norm().item(),
    "a format": lambda m: f"{m.weight.sum():.2f}",
    "a term of a loss": lambda m: torch.ones((), requires_grad=True) + m.weight.square().sum(),
    "one vector": lambda m: nn.utils.parameters_to_vector([m.weight, nn.Parameter(REAL)]),
    "many sums": lambda m: torch._foreach_add_([m.weight.data, REAL.clone()], [m.weight.data, m.weight.data]),
    "a forward with the weight": lambda m: nn.functional.linear(torch.ones(4, 3), m.weight),
    "pickle": lambda m: pickle.dumps(m.state_dict()),
    "safetensors": lambda m: save_file(m.state_dict(), "nowhere"),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
@pytest.mark.parametrize("read", READS)
def test_what_reads_values_raises_and_names_the_module_its_ranks_and_the_way_out(
    read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleContractError, match=r"of 'tower', which are on ranks 1, 2 only") as raised:
        READS[read](away())
    assert "handle.full_state_dict()" in str(raised.value)


def test_what_needs_no_values_goes_on():
    module = away()
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.is_meta, weight.requires_grad, tuple(weight.shape), weight.grad) == (True, True, (2, 3), None)
    assert [name for name, _ in module.named_parameters()] == list(module.state_dict()) == ["weight", "bias"]
    assert sum(p.numel() for p in module.parameters()) == 8
    assert "'tower' on ranks 1, 2" in repr(weight)
    optimizer = torch.optim.AdamW([*module.parameters(), nn.Parameter(REAL)])
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert module.double().weight is weight
    assert weight.dtype == torch.float64
    assert isinstance(weight, Elsewhere)


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_what_writes_does_nothing_here_and_what_is_made_of_stand_ins_is_one():
    module = away()
    with torch.no_grad():
        assert module.weight.mul_(0.5).add_(REAL) is module.weight
        assert module.weight.lerp_(REAL, torch.tensor(0.5)) is module.weight
        values = torch.ones(3)
        torch._foreach_lerp_([module.weight, values], [module.weight, torch.zeros(3)], 0.5)
    assert values.tolist() == [0.5] * 3
    assert isinstance((module.weight * 2).norm(), Elsewhere)
    module.load_state_dict({"weight": REAL, "bias": torch.ones(2)})
    assert isinstance(module.weight, Elsewhere)
