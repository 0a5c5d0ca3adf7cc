"""Loops as people write them, on streams: equal to the plain loop bit for bit, with every launch in order."""

from __future__ import annotations

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Record, TwoTowers, pair_batch
from loop_cases import LOOPS, NOT_THERE, LoopCase, batches, check, check_removing_between_forward_and_backward
from stream_cases import colocated, run_both
from torch import nn


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", [name for name, case in LOOPS.items() if case.streams != NOT_THERE])
def test_a_loop_on_streams_is_equal_to_the_plain_one(name: str):
    check(LOOPS[name], run_both, LOOPS[name].streams)


def test_two_losses_on_one_forward_and_gradients_of_gradients():
    def loop(model: nn.Module, record: Record) -> None:
        for batch in batches(3):
            out = model(*batch)
            out.square().mean().backward(retain_graph=True)
            out.abs().sum().backward(retain_graph=True)
            found = torch.autograd.grad(out.sum(), batch, create_graph=True)
            sum(grad.square().sum() for grad in found).backward()
            record.note_model(model)

    case = LoopCase(loop=loop)
    check(case, run_both, case.streams)


def test_removing_between_forward_and_backward():
    check_removing_between_forward_and_backward(colocated)


def test_weights_that_were_cast_to_warm_up_are_not_those_of_the_first_step():
    torch.manual_seed(0)
    model = TwoTowers()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*pair_batch())

    with colocated(model, run, SIDE_BY_SIDE) as (handle, _):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        ours = run()
        ours.square().mean().backward()
        with handle.disabled():
            assert torch.equal(ours, run())
