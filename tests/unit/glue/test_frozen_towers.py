"""Frozen modules keep their weights and their mode and hold no graph; adapters train inside of them."""

from __future__ import annotations

import glued_models as cases
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def trained(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(steps):
        model(**cases.batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bytes_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("order", [("vision", "vision.model"), ("vision.model", "vision")])
def test_a_frozen_module_inside_of_another_stays_frozen_until_it_is_unfrozen_itself(order: tuple[str, str]):
    model = cases.glued()
    before = {name for name, weight in model.named_parameters() if weight.requires_grad}
    model.freeze(*order, "vision").unfreeze("vision")
    trains = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trains == {name for name in before if not name.startswith("vision.model.")}
    assert (model.vision.model.training, model.vision.projector.training) == (False, True)
    model.unfreeze("vision.model")
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == before
    assert model.vision.model.training


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("where", ["around", "inside"])
def test_adapters_of_peft_train_and_nothing_else_does(where: str):
    torch.manual_seed(0)
    plain = cases.glued().freeze("vision.model", "language_model")
    config = LoraConfig(r=2, target_modules=r".*(language_model|vision).*(q_proj|v_proj)", lora_dropout=0.1)
    if where == "around":
        model: nn.Module = get_peft_model(plain, config)
    else:
        plain.language_model = get_peft_model(plain.language_model, LoraConfig(r=2, target_modules=["q_proj"]))
        model = plain
    model.train()
    assert {module.training for name, module in model.named_modules() if "lora_dropout" in name} == {True}
    base = {name: value for name, value in bytes_of(model).items() if "lora" not in name and "projector" not in name}
    base = {name: value for name, value in base.items() if "audio" not in name}
    trained(model)
    assert_equal(base, bytes_of(model))
    assert any("lora_B" in name and weight.abs().sum() > 0 for name, weight in model.named_parameters())


@pytest.mark.parametrize("name", ["visoin.model", "vision.encoder", "", "vision.projector.9"])
def test_a_module_that_is_not_there_cannot_be_frozen(name: str):
    with pytest.raises(
        ValueError, match=r"unknown module .*; choose one of: language_model, .*vision, .*vision\.projector"
    ):
        cases.glued().freeze(name)
