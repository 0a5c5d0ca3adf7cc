"""Errors, interrupts and changes inside of placed modules reach the caller, and the lanes go on."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_cases import (
    SIDE_BY_SIDE,
    Glued,
    TwoTowers,
    assert_trains_like_plain,
    colocate,
    pair_batch,
)

from mosaic.engine import Handle
from mosaic.errors import UnforeseenError


@pytest.mark.parametrize("handle", ["host"], indirect=True)
@pytest.mark.parametrize(("order", "where"), [("fail", "in module"), ("backward", "in the backward of module")])
def test_an_error_reaches_the_caller_with_its_place_and_lanes_go_on(
    model: TwoTowers, handle: Handle, order: str, where: str
):
    model.left.order = order
    for _ in range(2):
        with pytest.raises(ValueError, match="ward failed") as caught:
            model(*pair_batch()).sum().backward()
        error = caught.value.__context__ if order == "fail" else caught.value  # the call was made again without lanes
        (note,) = [note for note in error.__notes__ if note.startswith("raised")]
        assert f"raised {where} 'left', called at" in note
        assert "engine_cases.py" in note
    model.left.order = "work"
    model.zero_grad()
    assert_trains_like_plain(model, handle)


def test_an_error_in_a_module_whose_result_nobody_uses_reaches_the_caller(model: TwoTowers, handle: Handle):
    model.right.order = "fail"
    plain_forward = TwoTowers.forward
    TwoTowers.forward = lambda self, x, y: (self.left(x), self.right(y))[0]  # type: ignore[method-assign]
    try:
        with pytest.raises(ValueError, match="forward failed"):
            model(*pair_batch())
    finally:
        TwoTowers.forward = plain_forward  # type: ignore[method-assign]
    model.right.order = "work"
    assert_trains_like_plain(model, handle)


def test_gradients_from_before_a_backward_that_raised_do_not_come_back():
    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = model.left(x) * 1
        if guarded:
            left.register_hook(guard)  # after the backward of the other branch began
        return left * model.right(y)

    def guard(_: torch.Tensor) -> None:
        raise FloatingPointError("gradient is not finite")

    def loop(model: Glued) -> list[torch.Tensor]:
        gradients = []
        for step in range(4):
            guarded.clear()
            model(*pair_batch(step)).square().mean().backward()
            if step == 1:
                guarded.append(True)
                with pytest.raises(FloatingPointError):
                    model(*pair_batch(5)).square().mean().backward()
            else:
                gradients += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            model.zero_grad()
        return gradients

    guarded: list[bool] = []
    torch.manual_seed(0)
    model = Glued(glue)
    expected = loop(copy.deepcopy(model))
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        gradients = loop(model)
    finally:
        handle.remove()
    assert len(gradients) == len(expected)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("handle", ["host"], indirect=True)
def test_outside_of_the_model_s_call_a_result_of_another_shape_is_an_error_once(model: TwoTowers, handle: Handle):
    model.left.order = "shape"
    x = pair_batch()[0]
    with pytest.raises(UnforeseenError, match=r"'left', called at .* returned .*depend on values.*exclude=\['left'\]"):
        model.left(x)
    assert model.left(x).shape == (6, 3)
    model.left.order = "work"
    assert "ran in place" in handle.describe()
