"""Loops as people write them, on streams: equal to the plain loop bit for bit, with every launch in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import stream_cases
import test_training_loops as loops
import torch
from engine_cases import SIDE_BY_SIDE, Keeping, Record, TwoTowers, assert_same, pair_batch, tower, train, with_penalty
from stream_cases import colocated, run_both
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

SAME_ON_STREAMS: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (loops.test_a_plain_loop_is_equal, {"optimizer": torch.optim.AdamW}),
    (loops.test_a_plain_loop_is_equal, {"optimizer": torch.optim.SGD}),
    (loops.test_dropout_gets_the_plain_loop_s_random_numbers, {}),
    (loops.test_batch_norm_keeps_the_plain_loop_s_statistics, {}),
    (loops.test_several_forwards_before_one_backward_sum_in_the_plain_order, {"forwards": 3}),
    (loops.test_one_forward_of_a_module_that_repeats_a_parameter_runs_on_its_lane, {}),
    (loops.test_autocast_is_carried_to_the_lanes, {}),
    (loops.test_clipping_reads_whole_gradients_right_after_backward, {}),
    (loops.test_a_second_backward_needs_retain_graph_as_in_the_plain_loop, {}),
    (loops.test_freezing_and_unfreezing_is_equal, {}),
    (loops.test_gradients_of_inputs_are_plain_and_equal, {}),
    (loops.test_autograd_grad_returns_gradients_and_touches_none, {}),
    (loops.test_backward_to_named_inputs_reaches_those_only, {}),
    (loops.test_hooks_on_tensors_and_parameters_fire_once_with_plain_numbers, {}),
    (loops.test_a_default_device_is_no_obstacle_to_right_numbers, {}),
    (loops.test_anomaly_detection_is_equal, {}),
    (loops.test_branches_called_by_the_loop_itself_are_equal, {}),
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(("test", "given"), SAME_ON_STREAMS, ids=[test.__name__[5:] for test, _ in SAME_ON_STREAMS])
def test_what_holds_on_the_host_holds_on_streams(
    test: Callable[..., None], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loops, "run_both", lambda *args, **choice: stream_cases.run_both(*args, **choice)[0])
    test(**given)


def assert_all_on_lanes(make: Callable[[], nn.Module], loop: Any, sample: Any = None) -> None:
    described, _ = run_both(make, sample if sample is not None else pair_batch(), SIDE_BY_SIDE, loop)
    assert "in place" not in described
    assert "keeps to the order" not in described


# What the host has to run in place, and streams need not.


def test_several_forwards_of_a_module_that_repeats_a_parameter():
    assert_all_on_lanes(lambda: TwoTowers(loops.Repeating(), loops.Repeating()), loops.several(3))


def test_forwards_of_several_shapes():
    assert_all_on_lanes(loops.normed, loops.several(3, rows=(6, 4)))


def test_evaluation_between_steps_inference_mode_included():
    def loop(model: nn.Module, record: Record) -> None:
        for _ in range(2):
            train(2)(model, record)
            model.eval()
            for context in (torch.no_grad(), torch.inference_mode()):
                with context:
                    record.note(model(*pair_batch()).clone())
            record.note(model(*pair_batch()))
            model.train()

    assert_all_on_lanes(loops.dropping, loop)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_activation_checkpointing(where: str, reentrant: bool):
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower(8, 16, nn.Dropout(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layers, x, use_reentrant=reentrant)

    class Around(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            left = checkpoint(self.left, x, use_reentrant=reentrant)
            return (left @ self.weight) @ checkpoint(self.right, y, use_reentrant=reentrant).T

    make = Around if where == "around" else lambda: TwoTowers(Inside(), Inside())
    assert_all_on_lanes(make, loops.with_inputs(4), loops.differentiable(0))


def test_random_numbers_of_any_kind():
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = torch.rand(1, generator=torch.Generator().manual_seed(3))
            return self.layers(x) * random.random() + own

    def loop(model: nn.Module, record: Record) -> None:
        random.seed(0)
        train(4)(model, record)

    assert_all_on_lanes(lambda: TwoTowers(Skipping(), Skipping()), loop)


def test_a_result_kept_in_an_attribute_for_the_loop():
    assert_all_on_lanes(lambda: TwoTowers(Keeping()), with_penalty)


def test_counting_operators():
    def loop(model: nn.Module, record: Record) -> None:
        train(2)(model, record)
        with FlopCounterMode(display=False) as counter:
            train(2)(model, record)
        record.note(counter.get_total_flops())

    assert_all_on_lanes(TwoTowers, loop)


def test_two_losses_on_one_forward_and_gradients_of_gradients():
    def loop(model: nn.Module, record: Record) -> None:
        for step in range(3):
            batch = loops.differentiable(step)
            out = model(*batch)
            out.square().mean().backward(retain_graph=True)
            out.abs().sum().backward(retain_graph=True)
            found = torch.autograd.grad(out.sum(), batch, create_graph=True)
            sum(grad.square().sum() for grad in found).backward()
            record.note_model(model)

    assert_all_on_lanes(TwoTowers, loop)


def test_removing_between_forward_and_backward():
    torch.manual_seed(0)
    model = TwoTowers()
    plain, ours = Record(), Record()

    def loop(record: Record, between: Callable[[], None]) -> None:
        model.zero_grad()
        for step in range(3):
            loss = model(*pair_batch(step)).square().mean()
            if step == 2:
                between()
            loss.backward()
            record.note_model(model)

    loop(plain, lambda: None)
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        loop(ours, handle.remove)
    assert_same(plain, ours)


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
