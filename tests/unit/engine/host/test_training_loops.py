"""Loops as people write them: the colocated model computes what the plain one does, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from engine_cases import (
    SIDE_BY_SIDE,
    Keeping,
    Record,
    Skipping,
    TwoTowers,
    assert_same,
    colocate,
    pair_batch,
    run_both,
    tower,
    train,
    with_penalty,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode


def normed() -> TwoTowers:
    return TwoTowers(tower(8, 16, nn.BatchNorm1d(16)), tower(8, 16, nn.BatchNorm1d(16)))


def dropping() -> TwoTowers:
    return TwoTowers(tower(8, 16, nn.Dropout(0.3)), tower(8, 16, nn.Dropout(0.3)))


def several(forwards: int, rows: tuple[int, ...] = (6,), autocast: bool = False):
    """Several forwards before one backward; gradients of every other step are added to the next."""

    def loop(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                batches = [pair_batch(10 * step + index, rows[index % len(rows)]) for index in range(forwards)]
                losses = [model(*batch).float().square().mean() for batch in batches]
            sum(losses).backward()
            record.note(*losses)
            record.note_model(model, optimizer)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    return loop


class Repeating(nn.Module):
    """Uses one parameter three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(3):
            hidden = self.again(hidden).tanh()
        return hidden


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_plain_loop_is_equal(optimizer: type[torch.optim.Optimizer]):
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    described = run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, train(5, optimizer, **options))
    assert "in place" not in described


def test_dropout_gets_the_plain_loop_s_random_numbers():
    assert "in place" not in run_both(dropping, pair_batch(), SIDE_BY_SIDE, train(5))


def test_batch_norm_keeps_the_plain_loop_s_statistics():
    assert "in place" not in run_both(normed, pair_batch(), SIDE_BY_SIDE, train(5))


@pytest.mark.parametrize("forwards", [2, 3, 4])
def test_several_forwards_before_one_backward_sum_in_the_plain_order(forwards: int):
    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, several(forwards))


def test_several_forwards_of_a_module_that_repeats_a_parameter_run_in_place():
    described = run_both(lambda: TwoTowers(Repeating(), Repeating()), pair_batch(), SIDE_BY_SIDE, several(3))
    assert "it uses a parameter several times" in described


def test_one_forward_of_a_module_that_repeats_a_parameter_runs_on_its_lane():
    described = run_both(lambda: TwoTowers(Repeating(), Repeating()), pair_batch(), SIDE_BY_SIDE, train(4))
    assert "in place" not in described


def test_several_forwards_of_several_shapes_are_equal():
    described = run_both(normed, pair_batch(), SIDE_BY_SIDE, several(3, rows=(6, 4)))
    assert "other shapes than the plan was made for" in described


def test_autocast_is_carried_to_the_lanes():
    assert "in place" not in run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, several(1, autocast=True))


def test_several_forwards_under_one_autocast_run_in_place():
    described = run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, several(2, autocast=True))
    assert "autocast keeps its cast weights" in described


def test_clipping_reads_whole_gradients_right_after_backward():
    def loop(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(6):
            loss = model(*pair_batch(step)).square().mean() / 3
            loss.backward()
            if step % 3 == 2:
                record.note(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 3)
            record.note_model(model, optimizer)

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


def test_a_second_backward_needs_retain_graph_as_in_the_plain_loop():
    def loop(model: nn.Module, record: Record) -> None:
        for step in range(4):
            loss = model(*pair_batch(step)).square().mean()
            loss.backward(retain_graph=True)
            record.note_model(model)
            loss.backward()
            record.note_model(model)
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            model.zero_grad()

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


def test_evaluation_between_steps_is_equal():
    def loop(model: nn.Module, record: Record) -> None:
        for _ in range(2):
            train(2)(model, record)
            model.eval()
            for context in (torch.no_grad(), torch.no_grad(), torch.inference_mode()):
                with context:
                    record.note(model(*pair_batch()))
            record.note(model(*pair_batch()))
            model.train()

    described = run_both(dropping, pair_batch(), SIDE_BY_SIDE, loop)
    assert "inference mode is active" in described


def test_freezing_and_unfreezing_is_equal():
    def loop(model: nn.Module, record: Record) -> None:
        for frozen in (True, False, True):
            model.left.requires_grad_(not frozen)
            train(3)(model, record)

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


def test_gradients_of_inputs_are_plain_and_equal():
    def loop(model: nn.Module, record: Record) -> None:
        for step in range(4):
            batch = differentiable(step)
            model(*batch).square().mean().backward()
            assert all(type(tensor.grad) is torch.Tensor for tensor in batch)
            record.note(*(tensor.grad for tensor in batch))

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


def test_autograd_grad_returns_gradients_and_touches_none():
    def loop(model: nn.Module, record: Record) -> None:
        for step in range(4):
            batch = differentiable(step)
            loss = model(*batch).square().mean()
            found = torch.autograd.grad(loss, batch, retain_graph=True)
            found += torch.autograd.grad(loss, list(model.parameters()))
            assert all(type(tensor) is torch.Tensor for tensor in found)
            record.note(*found)
            assert all(parameter.grad is None for parameter in model.parameters())

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


def test_backward_to_named_inputs_reaches_those_only():
    def loop(model: nn.Module, record: Record) -> None:
        for step in range(4):
            x, y = (tensor.requires_grad_() for tensor in pair_batch(step))
            model(x, y).square().mean().backward(inputs=[model.left[0].weight, model.weight, x])
            record.note(x.grad)
            assert y.grad is None
            record.note_model(model)

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


def test_gradients_of_gradients_are_refused_and_work_when_disabled():
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        for step in range(3):
            batch = differentiable(step)
            model(*batch).sum().backward()
        with pytest.raises(Exception, match="create_graph=True"):
            torch.autograd.grad(model(*batch).sum(), batch, create_graph=True)
        with handle.disabled():
            (grad, _) = torch.autograd.grad(model(*batch).square().sum(), batch, create_graph=True)
            grad.square().sum().backward()
    finally:
        handle.remove()


def test_hooks_on_tensors_and_parameters_fire_once_with_plain_numbers():
    class Hooked(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            left, right = self.left(x), self.right(y)
            left.retain_grad()
            left.register_hook(lambda grad: grad * 2)
            self.__dict__["kept"] = left
            return left @ right.T

    def loop(model: nn.Module, record: Record) -> None:
        calls: list[int] = []
        model.left[0].weight.register_hook(lambda grad: (calls.append(1), grad * 3)[1])
        model.right[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(2))
        for step in range(4):
            model(*pair_batch(step)).square().mean().backward()
            record.note(model.__dict__.pop("kept").grad + 0)
            record.note_model(model)
            assert sorted(calls) == [1, 2]
            calls.clear()

    run_both(Hooked, pair_batch(), SIDE_BY_SIDE, loop)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_module_runs_in_place(reentrant: bool):
    class Checkpointing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower(8, 16, nn.Dropout(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layers, x, use_reentrant=reentrant)

    described = run_both(
        lambda: TwoTowers(Checkpointing(), Checkpointing()), differentiable(0), SIDE_BY_SIDE, with_inputs(4)
    )
    assert "activation checkpointing" in described


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_a_module_is_equal(reentrant: bool):
    class Checkpointed(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            left = checkpoint(self.left, x, use_reentrant=reentrant)
            return (left @ self.weight) @ checkpoint(self.right, y, use_reentrant=reentrant).T

    described = run_both(Checkpointed, differentiable(0), SIDE_BY_SIDE, with_inputs(4))
    assert "activation checkpointing" in described


def differentiable(step: int) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in pair_batch(step)]


def with_inputs(steps: int):
    def loop(model: nn.Module, record: Record) -> None:
        for step in range(steps):
            batch = differentiable(step)
            model(*batch).square().mean().backward()
            record.note(torch.rand(1), *(tensor.grad for tensor in batch))
            record.note_model(model)

    return loop


def test_other_random_numbers_run_in_place():
    def loop(model: nn.Module, record: Record) -> None:
        random.seed(0)
        train(4)(model, record)

    described = run_both(lambda: TwoTowers(Skipping(), Skipping()), pair_batch(), SIDE_BY_SIDE, loop)
    assert "Python's or numpy's random numbers" in described


def test_a_result_kept_in_an_attribute_makes_the_module_run_in_place():
    described = run_both(lambda: TwoTowers(Keeping()), pair_batch(), SIDE_BY_SIDE, with_penalty)
    assert "keeps a result in its attribute 'penalty'" in described


def test_a_module_in_place_beside_one_on_a_lane_gets_plain_gradients():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x) + torch.rand(1, generator=torch.Generator().manual_seed(3))

    class Product(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.left(x) * self.right(y)

    described = run_both(lambda: Product(Own()), pair_batch(), SIDE_BY_SIDE, train(5, torch.optim.SGD, momentum=0.9))
    assert "a generator of its own" in described


def test_sparse_gradients_add_up():
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(10, 16, sparse=True), nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x.abs().long().clamp(max=9)).sum(1) + self.linear(x)

    def loop(model: nn.Module, record: Record) -> None:
        for step in range(4):
            losses = [model(*pair_batch(step + 10 * index)).square().mean() for index in range(2)]
            sum(losses).backward()
            record.note(*losses, *(parameter.grad.to_dense() for parameter in model.parameters()))

    run_both(lambda: TwoTowers(Bag()), pair_batch(), SIDE_BY_SIDE, loop)


def test_counting_operators_sees_all_of_them():
    def loop(model: nn.Module, record: Record) -> None:
        train(2)(model, record)
        with FlopCounterMode(display=False) as counter:
            train(2)(model, record)
        record.note(counter.get_total_flops())
        train(2)(model, record)

    assert "another torch mode is active" in run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


def test_a_default_device_is_no_obstacle_to_right_numbers():
    def loop(model: nn.Module, record: Record) -> None:
        with torch.device("cpu"):
            train(2)(model, record)
        train(2)(model, record)

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_is_equal():
    def loop(model: nn.Module, record: Record) -> None:
        with torch.autograd.set_detect_anomaly(True):
            train(4)(model, record)

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


def test_branches_called_by_the_loop_itself_are_equal():
    def loop(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            x, y = pair_batch(step)
            loss = (model.left(x) + model.right(y)).square().mean()
            ahead = model.right(pair_batch(step + 1)[1])
            loss.backward()
            optimizer.step()
            record.note(loss, ahead)
            record.note_model(model)
            optimizer.zero_grad()

    run_both(normed, pair_batch(), SIDE_BY_SIDE, loop)


def test_removing_between_forward_and_backward_is_equal():
    torch.manual_seed(0)
    model = TwoTowers()
    plain, ours = Record(), Record()

    def loop(record: Record, between) -> None:
        model.zero_grad()
        for step in range(3):
            loss = model(*pair_batch(step)).square().mean()
            if step == 2:
                between()
            loss.backward()
            record.note_model(model)

    loop(plain, lambda: None)
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    loop(ours, handle.remove)
    assert_same(plain, ours)
