"""Whatever a model, a partition, an order and a step are, chunks on ranks make the plain loop's losses and gradients.

Models are drawn: two or three encoders that feed the text or each other, with tied weights, results that are read again
at the end, frozen layers and dropout; so are partitions, orders, ragged steps, layers made again and pieces of
encoders. Ranks are two to four threads, each with a copy of the model that has its own weights.
"""

from __future__ import annotations

import random

import pytest
import torch
from executor_cases import METHODS
from lane_cases import WIDTH, LanedModel, Layer, Microbatch, plain, run
from pipeline_cases import cut_in_pieces
from torch import nn

from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.pipelining.partition import Request
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.ranks.pipeline.counting import count_model

ENCODERS = ("vision", "audio", "depth")
CASES = 6
"""For each precision."""
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}
"""How far a gradient may be off, over its length."""
NOISE = 1e-3
"""Of the longest gradient: shorter ones are sums of what cancels."""


class Drawn(nn.Module):
    """Encoders of drawn depths, each of which feeds the text or a later encoder."""

    def __init__(self, chance: random.Random, *, dropout: float) -> None:
        super().__init__()
        self.names = ENCODERS[: chance.randint(2, 3)]
        for name in self.names:
            setattr(self, name, nn.ModuleList(Layer(dropout) for _ in range(chance.randint(2, 4))))
        self.feeds = {name: chance.choice([*self.names[at + 1 :], "text"]) for at, name in enumerate(self.names)}
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.text = nn.ModuleList(Layer(dropout) for _ in range(chance.randint(3, 5)))
        if chance.random() < 0.5:
            self.head.weight = self.stem.weight
        if chance.random() < 0.3:
            self.text[0].inner.weight = self.vision[0].inner.weight
        self.reads_again = chance.random() < 0.5
        for layer in (one for name in (*self.names, "text") for one in getattr(self, name)):
            layer.requires_grad_(chance.random() < 0.7)

    def forward(
        self,
        words: torch.Tensor,
        vision: torch.Tensor | None = None,
        audio: torch.Tensor | None = None,
        depth: torch.Tensor | None = None,
    ) -> torch.Tensor:
        made = {"text": self.stem(words)}
        for name, given in zip(ENCODERS, (vision, audio, depth), strict=True):
            if given is None:
                continue
            hidden = given + made.pop(name, 0)
            for layer in getattr(self, name):
                hidden = layer(hidden)
            made[self.feeds[name]] = made.get(self.feeds[name], 0) + hidden.mean(0)
        hidden = first = self.text[0](made["text"])
        for layer in self.text[1:]:
            hidden = layer(hidden)
        return self.head(hidden + first if self.reads_again else hidden).square().mean()


def drawn(chance: random.Random, dtype: torch.dtype) -> LanedModel:
    """A model, a ragged step of it, and a partition."""
    drops = chance.random() < 0.4
    model = Drawn(chance, dropout=0.3 if drops else 0.0).to(dtype)
    step = []
    for words in range(5, 5 + chance.randint(1, 5)):
        counts = {name: chance.randint(0, 4) if step else 2 for name in model.names}
        given = {name: torch.randn(count, words, WIDTH, dtype=dtype) for name, count in counts.items() if count}
        step.append({"words": torch.randn(words, WIDTH, dtype=dtype), **given})
    split = find_split(model, step[0])
    counted = count_model(model, split, step[0], RankHardware(cluster=find_cluster("host", 4)))
    # The plain loop draws the numbers of all units at once, so what drops elements runs whole.
    sizes = {} if drops else {name: chance.randint(1, 4) for name in model.names if model.feeds[name] == "text"}
    seen = [counted.microbatch(one) for one in step]
    partition = None
    while partition is None:
        request = Request(model=counted.model, num_ranks=chance.randint(2, 4), microbatches=seen)
        try:
            partition = cut_in_pieces(chance.choice(METHODS), request, sizes)
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
        schedule = case.drawn(seed, strategy=chance.choice(["keep", "recompute"]))
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
