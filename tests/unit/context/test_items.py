from __future__ import annotations

import pytest
import torch

from mosaic.context import share_items
from mosaic.context.attention import gather_items


def test_the_image_with_most_patches_goes_to_the_rank_with_least():
    share = share_items([4, 9, 2, 5], 2)
    assert share.rank_of == (1, 0, 0, 1)
    assert [share.rows_of(rank) for rank in range(2)] == [11, 9]
    assert share.places_of(1).tolist() == [0, 1, 2, 3, 15, 16, 17, 18, 19]


def test_one_rank_and_no_items_are_as_without_sharing():
    features = torch.randn(6, 2, requires_grad=True)
    gathered = gather_items(features, share_items([4, 2], 1))
    gathered.square().sum().backward()
    assert torch.equal(gathered, features)
    assert torch.equal(features.grad, 2 * features)
    assert gather_items(features[:0], share_items([], 1)).shape == (0, 2)


def test_other_rows_than_shared_out_are_refused():
    with pytest.raises(ValueError, match=r"rank 0 of 1 has features of shape \(5, 2\); .* \[0, 1\] make 6 rows"):
        gather_items(torch.zeros(5, 2), share_items([4, 2], 1))
    with pytest.raises(ValueError, match=r"items of \[4, -2\] rows for 1 ranks; use rows of 0 or more"):
        share_items([4, -2], 1)
