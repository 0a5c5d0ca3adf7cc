"""Chains of decoders from Hugging Face's classes, cut between layers."""

from __future__ import annotations

import pytest
import torch
from chained_chunks import ChunkChain, chunks_of
from part_models import DECODERS, PartedCase

from mosaic.parts.find import find_split

STRATEGIES = ("keep", "recompute", "offload")


@pytest.mark.parametrize("name", DECODERS)
def test_chunks_give_the_plain_models_loss_and_gradients(name: str):
    case = DECODERS[name]
    check_equal(case)


def check_equal(case: PartedCase) -> None:
    torch.manual_seed(3)
    model = case.make()
    kwargs = case.batch()
    split = find_split(model, kwargs, modules=case.modules)
    assert split.feeds == case.feeds
    torch.manual_seed(5)
    plain = case.loss(model(**kwargs))
    plain.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for number, cut in enumerate(case.cuts):
        model.zero_grad()
        chain = ChunkChain(model, split, chunks_of(*cut))
        torch.manual_seed(5)
        loss = chain.step(kwargs, case.loss, strategy=STRATEGIES[number % len(STRATEGIES)])
        assert torch.equal(loss, plain)
        found = chain.gradients()
        assert found.keys() == wanted.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(
                gradient, wanted[key], rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
            )
