"""Whatever a partition, an order and a step are, chunks on ranks make the plain loop's losses and gradients.

Partitions, orders, ragged steps, frozen layers, dropout, layers made again, backward for weights apart and pieces of
encoders are drawn; two to four ranks are threads, each with a copy of the model that has its own chunks' weights alone.
"""

from __future__ import annotations

import random

import pytest
import torch
from executor_cases import METHODS
from lane_cases import LanedModel, Microbatch, Seen, plain, run, seen_step

from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.partition.request import Request
from mosaic.ranks.pipeline.counting import count_model

CASES = 6
"""For each precision."""
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}
"""How far a gradient may be off, over its length."""
NOISE = 1e-3
"""Of the longest gradient: shorter ones are sums of what cancels."""


def drawn(chance: random.Random, dtype: torch.dtype) -> LanedModel:
    """A model with frozen layers, a ragged step of it, and a partition."""
    drops = chance.random() < 0.4
    model = Seen(dropout=0.3 if drops else 0.0).to(dtype)
    for layers in (model.vision, model.audio, model.text):
        for layer in layers:
            layer.requires_grad_(chance.random() < 0.7)
    counts = [(chance.randint(0, 4), chance.randint(0, 3)) for _ in range(chance.randint(0, 4))]
    step = [{name: one.to(dtype) for name, one in given.items()} for given in seen_step((3, 2), *counts)]
    split = find_split(model, step[0])
    counted = count_model(model, split, step[0], find_cluster("host", 4).hardware)
    # The plain loop draws the numbers of all units at once, so what drops elements runs whole.
    sizes = {} if drops else {name: chance.randint(1, 4) for name in ("vision", "audio")}
    seen = [counted.microbatch(one) for one in step]
    partition = None
    while partition is None:
        request = Request(model=counted.model, num_ranks=chance.randint(2, 4), microbatches=seen, sizes=sizes)
        try:
            partition = partition_by(chance.choice([name for name in METHODS if name != "lanes"]), request)
        except ValueError:  # too few layers, or ranks
            continue
    return LanedModel(model=model, counted=counted, partition=partition, step=step, loss=_weighted)


def _weighted(output: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    return output * len(microbatch["words"])


@pytest.mark.parametrize("dtype", BOUND)
def test_any_partition_order_and_step_has_the_plain_loops_losses_and_gradients(dtype: torch.dtype):
    for seed in range(CASES):
        chance = random.Random(seed)
        torch.manual_seed(seed)
        case = drawn(chance, dtype)
        schedule = case.drawn(seed, strategy=chance.choice(["keep", "recompute"]), weights_apart=chance.random() < 0.5)
        torch.manual_seed(seed)
        wanted, losses = plain(case)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        found, ended = run(case, schedule, backend=None)
        assert torch.equal(torch.get_rng_state(), after), seed
        assert torch.allclose(torch.tensor(ended), torch.tensor(losses), rtol=BOUND[dtype]), seed
        assert found.keys() == wanted.keys(), seed
        longest = max((gradient.norm() for gradient in wanted.values()), default=torch.zeros(()))
        for name, gradient in found.items():
            off = (gradient - wanted[name]).norm()
            assert off <= BOUND[dtype] * torch.maximum(wanted[name].norm(), NOISE * longest), (seed, name)
