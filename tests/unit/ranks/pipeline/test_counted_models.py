"""The counts of a user's model, for planning."""

from __future__ import annotations

import torch
from part_models import SEVERAL_MODULES

from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.ranks.pipeline.counting import count_model


def test_layers_whose_operators_follow_from_values_are_counted_on_data():
    case = SEVERAL_MODULES["qwen3-vl"]
    torch.manual_seed(3)
    model, batch = case.make(), case.batch()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    counted = count_model(model, find_split(model, batch), batch, RankHardware(cluster=find_cluster("host", 2)))
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in counted.layers["visual"])
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
