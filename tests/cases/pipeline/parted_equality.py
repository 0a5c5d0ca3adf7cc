"""Comparisons of chunks with the plain model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from part_models import PartedCase, chunks_of
from torch import nn

from bench.sweep.parted import ChunkChain
from mosaic.parts.chunk_call import STRATEGIES
from mosaic.parts.finding.find import find_split
from mosaic.parts.split import ModelSplit, copied


def check_equal(case: PartedCase) -> None:
    """Runs the plain model, and the chunks of each of the case's cuts, each with another strategy."""
    torch.manual_seed(3)
    model = case.make()
    kwargs = case.batch()
    split = find_split(model, kwargs)
    assert split.feeds == case.feeds
    for number, cut in enumerate(case.cuts):
        check_cut(case, model, split, cut, kwargs, strategy=STRATEGIES[number % len(STRATEGIES)])


def check_cut(
    case: PartedCase,
    model: nn.Module,
    split: ModelSplit,
    cut: tuple[str, ...],
    kwargs: Mapping[str, Any],
    *,
    strategy: str = "keep",
    sizes: Mapping[str, int] | None = None,
    rtol: float = 1e-6,
) -> None:
    """Compares one microbatch's loss and gradients."""
    model.zero_grad()
    whole = copy.deepcopy(model)
    torch.manual_seed(5)
    plain = case.loss(whole(**copied(dict(kwargs))))
    plain.backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    chain = ChunkChain(model, split, chunks_of(*cut))
    torch.manual_seed(5)
    loss = chain.step(kwargs, case.loss, strategy=strategy, sizes=sizes)
    torch.testing.assert_close(loss, plain.detach(), rtol=0 if sizes is None else rtol, atol=0)
    found = chain.gradients()
    assert found.keys() == wanted.keys()
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=rtol, atol=rtol * scale, msg=key)
