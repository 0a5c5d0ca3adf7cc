"""``with mosaic.parallel() as p``: the explicit form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_cases import Explicit, assert_same, explicit_steps, pair_batch, tower

import mosaic


@pytest.mark.parametrize("quotas", [None, {"left": 1}], ids=["by turns", "by quota"])
def test_a_block_computes_what_the_plain_code_does(quotas: dict[str, int] | None):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Explicit()
    twin = copy.deepcopy(model)
    found = explicit_steps(model, "run", {"left": 1, "right": 1} if quotas and threads > 1 else None)
    assert_same(explicit_steps(twin), found)
    torch.set_num_threads(threads)


def test_an_error_is_raised_in_the_block_at_the_latest():
    orders = ["work"]

    def work(x: torch.Tensor) -> torch.Tensor:
        if orders[-1] == "fail":
            raise ValueError("no")
        return x + 1

    for _ in range(2):
        with mosaic.parallel() as p:
            p.run("failing", work, torch.ones(3))
    orders.append("fail")
    with pytest.raises(ValueError, match="no"), mosaic.parallel() as p:  # noqa: PT012
        kept = p.run("failing", work, torch.ones(3))
        assert kept.shape == (3,)
    orders.append("work")
    with mosaic.parallel() as p:
        kept = p.run("failing", work, torch.ones(3))
    assert torch.equal(kept + 0, torch.full((3,), 2.0))


def test_names_that_share_a_parameter_run_in_place_with_right_gradients():
    shared = tower()
    gradients: list[Any] = []
    for plain in (True, False):
        shared.zero_grad()
        for step in range(3):
            x, y = pair_batch(step)
            if plain:
                loss = (shared(x) * shared(y)).sum()
            else:
                with mosaic.parallel() as p:
                    loss = (p.run("one", shared, x) * p.run("other", shared, y)).sum()
            loss.backward()
        gradients.append([parameter.grad.clone() for parameter in shared.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
