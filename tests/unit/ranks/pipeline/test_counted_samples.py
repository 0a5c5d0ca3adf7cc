"""What a sample's run shows of steps to come, and what later batches show that the sample did not."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mosaic.errors import UnsplittableError
from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.ranks.pipeline.counting import CountedModel, count_model
from mosaic.ranks.pipeline.step import WatchedState


def counted(model: nn.Module, **sample: Any) -> CountedModel:
    return count_model(model, find_split(model, sample), sample, RankHardware(cluster=find_cluster("host", 2)))


class Reseeding(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            mask = torch.rand_like(input)
        return super().forward(nn.functional.dropout(input * mask, 0.1))


class Seeding(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return super().forward(input)


class Dropping(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self:
            input = input if torch.rand(()) < 0.05 else layer(input)
        return input


class Packed(nn.Module):
    """Unpacks what a recurrent module has made: on ranks without it, of lengths of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.layers = nn.GRU(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x, _ = pad_packed_sequence(self.rnn(pack_padded_sequence(x, lengths, enforce_sorted=False))[0])
        return self.layers(x)


def test_what_ranks_cannot_repeat_without_the_layers_is_refused():
    model = nn.Sequential(Reseeding(4, 4), Reseeding(4, 4))
    with pytest.raises(UnsplittableError, match=r"such as behind torch\.manual_seed"):
        counted(model, input=torch.randn(2, 4))
    with pytest.raises(UnsplittableError, match="Seeding seeds torch's generator"):
        counted(nn.Sequential(Seeding(4, 4), Seeding(4, 4)), input=torch.randn(2, 4))
    torch.manual_seed(0)  # with which the sample's run drops none
    with pytest.raises(UnsplittableError, match=r"\d is skipped at random, which no schedule knows"):
        counted(Dropping(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), input=torch.randn(2, 4))
    with pytest.raises(UnsplittableError, match="zeros for results of others, the model raises"):
        counted(Packed(), x=torch.randn(5, 2, 3), lengths=torch.tensor([3, 5]))


def test_numbers_and_buffers_that_larger_batches_change_are_named_and_put_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.longest, model[0].calls, model[0].rng = 3, 0.5, random.Random(3)
    model[0].register_buffer("cache", torch.ones(3))
    model[1].register_buffer("scratch", torch.ones(2))
    sites = [SimpleNamespace(path="0", has_effects=False), SimpleNamespace(path="1", has_effects=True)]
    state, cache = WatchedState(model, SimpleNamespace(sites=sites)), model[0].cache
    model[1].scratch.add_(1)  # in the sample's run, too
    assert not state.changed()
    model[0].cache = torch.ones(5)
    assert state.changed() == "0.cache"
    assert model[0].cache is cache
    model.longest = 5
    assert (state.changed(), model.longest) == ("longest", 3)
    cache.add_(1)
    assert state.changed() == "0.cache"
    state.begin()
    model[0].rng.random()
    assert state.changed() == "0.rng"
