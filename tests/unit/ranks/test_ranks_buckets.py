"""Buckets of gradients: memory is kept from step to step, and nobody else's gradient changes with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mosaic.ranks.parameters import buckets
from mosaic.ranks.parameters.buckets import Bucket, InPlace, Sparse, Together, buckets_of


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def summed(bucket: Bucket, there: set[int] | None = None) -> None:
    """Reduces over two ranks of which both have the same."""
    total = bucket.gather()
    bucket.hand_out(total.mul_(2), {id(p) for p in bucket.parameters} if there is None else there)


def test_buckets_start_with_the_last_gradients_and_the_last_bucket_has_room_for_a_flag_of_each():
    first, half, second, third = (*parameters(3), *parameters(2, dtype=torch.float16), *parameters(2, 2))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    found = buckets_of([first, half, frozen, second, third], 16, (), 2)
    assert [[id(p) for p in bucket.parameters] for bucket in found] == [
        [id(third), id(second)],
        [id(half)],
        [id(first)],
    ]
    for parameter in (first, half, second, third):
        parameter.grad = torch.ones_like(parameter)
    assert [len(bucket.gather()) for bucket in found] == [4, 2, 3 + 4]
    assert buckets_of([frozen], 16, (), 2) == []


def test_a_gradient_becomes_a_view_of_memory_that_the_next_step_uses_again():
    one, other = parameters(3, 2)
    bucket = Together(one, 2)
    bucket.parameters += [one, other]
    places = []
    for _ in range(3):
        one.grad, other.grad = torch.full((3,), 4.0), torch.full((2,), 6.0)
        bucket.take(other)
        summed(bucket)
        assert (one.grad.tolist(), other.grad.tolist()) == ([4.0] * 3, [6.0] * 2)
        places.append(one.grad.data_ptr())
        one.grad = other.grad = None
    assert len(set(places)) == 1


def test_a_gradient_of_an_earlier_step_that_somebody_kept_stays_as_it_was():
    (one,) = parameters(3)
    bucket = Together(one, 2)
    bucket.parameters.append(one)
    one.grad = torch.full((3,), 4.0)
    summed(bucket)
    kept, one.grad = one.grad, torch.full((3,), 8.0)
    summed(bucket)
    assert kept.tolist() == [4.0] * 3
    assert one.grad.tolist() == [8.0] * 3


def test_what_is_added_to_a_gradient_is_summed_in_its_place():
    (one,) = parameters(3)
    bucket = Together(one, 2)
    bucket.parameters.append(one)
    one.grad = torch.full((3,), 4.0)
    summed(bucket)
    before = one.grad
    one.grad += 2
    bucket.take(one)
    summed(bucket)
    assert one.grad is before
    assert before.tolist() == [6.0] * 3


@pytest.mark.parametrize("large", [False, True])
def test_gradients_in_one_piece_of_memory_are_summed_as_copies(large: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "_LARGE_BYTES", 4 if large else 2**20)
    one, other = parameters(3, 3)
    found = buckets_of([one, other], 2**20, (), 2)
    one.grad = torch.full((3,), 4.0)
    other.grad = one.grad.view(3)
    totals = [bucket.gather() for bucket in found]
    for bucket, total in zip(found, totals, strict=True):
        bucket.hand_out(total.mul_(2), {id(one), id(other)})
    assert isinstance(found[0], InPlace) == large
    assert (one.grad.tolist(), other.grad.tolist()) == ([4.0] * 3, [4.0] * 3)


def test_a_large_gradient_is_summed_where_it_lies_and_has_one_afterwards_where_any_rank_had_one():
    (one,) = parameters(3)
    bucket = InPlace(one, 2)
    one.grad = torch.full((3,), 4.0)
    assert bucket.gather().data_ptr() == one.grad.data_ptr()
    assert one.grad.tolist() == [2.0] * 3
    one.grad = None
    summed(bucket, there=set())
    assert one.grad is None
    summed(bucket)
    assert one.grad.tolist() == [0.0] * 3


def test_a_sparse_gradient_stays_away_where_no_rank_has_elements():
    table = nn.Parameter(torch.zeros(4, 2))
    bucket = Sparse(table, 2)
    summed(bucket)
    assert table.grad is None
    table.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (4, 2), check_invariants=True)
    summed(bucket)
    assert table.grad.to_dense()[1].tolist() == [2.0, 2.0]
