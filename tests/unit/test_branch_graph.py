"""Where a module's graph takes its inputs in."""

from __future__ import annotations

import pytest
import torch

from mosaic.engine.calls.branch_graph import capture, find_leaves, find_uses, survey


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_every_use_of_an_input_is_found_last_operator_first():
    x, y = leaf(3), leaf(3)
    first = x.sin()
    second = x * y
    third = (first + x).exp()
    uses = find_uses([second, third], [x, y])
    assert [(type(use.node).__name__, use.position, use.input) for use in uses] == [
        ("AddBackward0", 1, 0),
        ("MulBackward0", 0, 0),
        ("MulBackward0", 1, 1),
        ("SinBackward0", 0, 0),
    ]


def test_the_search_stops_at_the_inputs():
    outer = leaf(3)
    x = outer * 2
    assert len(find_uses([x.sin()], [x])) == 1
    assert find_uses([x], [x]) == []
    assert find_uses([outer.cos()], [x]) == []


def test_captured_gradients_sum_to_the_plain_one_in_plain_order():
    torch.manual_seed(0)
    x = leaf(64)
    result = [x.sin() * x, x.exp() / (x + 2), (x @ x) * x]
    (plain,) = torch.autograd.grad([part.sum() for part in result], x, retain_graph=True)
    uses = find_uses(result, [x])
    into: list[torch.Tensor | None] = [None] * len(uses)
    capture(uses, into)
    torch.autograd.backward([part.sum() for part in result])
    assert x.grad is None
    total = into[0]
    for part in into[1:]:
        total = total + part
    assert torch.equal(total, plain)


@pytest.mark.parametrize("shared", [False, True])
def test_a_survey_counts_how_often_leaves_are_used(shared: bool):
    weight, other = leaf(4, 4), leaf(4, 4)
    x = leaf(4, 4) * 1
    result = (x @ weight) @ (weight if shared else other)
    found = survey([result], [x])
    assert found.uses[id(weight)] == 1 + shared
    assert set(found.leaves) == {id(weight)} | (set() if shared else {id(other)})
    assert "MmBackward0" in found.names


def test_leaves_of_a_leaf_are_itself():
    weight = leaf(2)
    assert [id(found) for found in find_leaves([weight])] == [id(weight)]
    assert find_leaves([torch.ones(2)]) == []
