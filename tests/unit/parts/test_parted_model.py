"""A rank's part of a model: memory, names, and what stays of the user's model."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from part_models import SEVERAL_MODULES, chunks_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.weights import drop_weights
from mosaic.ranks.pipeline.random_numbers import DrawnNumbers


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["whisper", "llava", "qwen3-vl"])
def test_each_weight_is_on_the_ranks_that_need_it_and_has_no_memory_elsewhere(name: str):
    case = SEVERAL_MODULES[name]
    model, chunks = case.make(), chunks_of(*case.cuts[1])
    split = find_split(model, case.batch())
    ranks = [PartedModel(copy.deepcopy(model), split, chunks, own=[i]) for i in range(len(chunks))]
    whole, counts = tensors_of(model), []
    union: dict[str, torch.Tensor] = {}
    for index, rank in enumerate(ranks):
        own = {key for key, parameter in rank.model.named_parameters() if not parameter.is_meta}
        assert own == rank.split.parameters_of(rank.chunks[index])
        counts.append(sum(rank.model.get_parameter(key).numel() for key in own))
        union |= {key: value for key, value in tensors_of(rank.model).items() if not value.is_meta}
    assert union.keys() == whole.keys()
    assert all(torch.equal(union[key], value) for key, value in whole.items())
    whole_count = sum(p.numel() for p in model.parameters())
    shared = dict(ranks[0].split.shared_parameters(ranks[0].chunks))
    twice = sum(model.get_parameter(key).numel() * (len(users) - 1) for key, users in shared.items())
    assert sum(counts) == whole_count + twice
    assert list(shared) == (["model.decoder.embed_tokens.weight"] if name == "whisper" else [])


def test_finding_and_running_leave_the_model_as_it_was():
    case = SEVERAL_MODULES["whisper"]
    model = case.make()
    kwargs = case.batch()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    split = find_split(model, kwargs)
    assert torch.equal(state, torch.get_rng_state())
    rank = PartedModel(model, split, chunks_of(*case.cuts[0]))
    rank.boundary_like(0, kwargs)
    assert torch.equal(state, torch.get_rng_state())
    rank.forward(0, kwargs)
    with pytest.raises(ValueError, match="Whisper expects"):
        rank.forward(0, {**kwargs, "input_features": torch.randn(2, 4, 8)})
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


class Skipping(nn.Sequential):
    """Adds what its first layer returned at the end, if it is told to."""

    share = 0.0

    def forward(self, x: torch.Tensor, how: Any = "straight") -> torch.Tensor:
        first = self[0](x)
        x = self[2](self[1](first.tanh()))
        return x + first if how == "skip" or (how != "straight" and getattr(how, "on", how)) or self.share else x


@pytest.mark.parametrize(
    ("straight", "skip"),
    [
        ("straight", "skip"),
        (0, 1),
        (0.0, 0.3),
        ([], [1]),
        (torch.tensor(False), torch.tensor(True)),
        (SimpleNamespace(on=False), SimpleNamespace(on=True)),
    ],
)
def test_a_microbatch_that_takes_another_way_than_the_sample_is_refused(straight: Any, skip: Any):
    torch.manual_seed(0)
    given = {"x": torch.randn(2, 4), "how": straight}
    for sample, refused in ((given, True), ({**given, "how": skip}, False)):
        model = Skipping(*(nn.Linear(4, 4) for _ in range(3)))
        chunks = chunks_of("model[0:2/3]", "model[2:3/3]")
        parted = PartedModel(model, find_split(model, sample), chunks)
        for how in (straight, skip):
            sent = parted.forward(0, {**given, "how": how})
            if how is skip and refused:
                with pytest.raises(UnsplittableError, match=r"needs results of others "):
                    parted.forward(1, {**given, "how": how}, sent)
            else:
                assert torch.equal(parted.forward(1, {**given, "how": how}, sent), model(**{**given, "how": how}))


def test_an_attribute_that_chooses_another_way_is_refused():
    model, given = Skipping(*(nn.Linear(4, 4) for _ in range(3))), {"x": torch.randn(2, 4)}
    model.share = 0.0
    parted = PartedModel(model, find_split(model, given), chunks_of("model[0:2/3]", "model[2:3/3]"))
    numbers = DrawnNumbers(parted)
    numbers.draw(given)
    parted.forward(1, given, parted.forward(0, given))
    model.share = 0.5
    numbers.draw(given)
    with pytest.raises(UnsplittableError, match="needs results of others"):
        parted.forward(1, given, parted.forward(0, given))


def test_hooks_on_gradients_that_cross_ranks_are_refused():
    class Hooked(Skipping):
        def forward(self, x: torch.Tensor, how: Any = "skip") -> torch.Tensor:
            first = self[0](x)
            if first.requires_grad:
                first.register_hook(lambda gradient: gradient.clamp(-1, 1))
            return self[2](self[1](first.tanh())) + first

    given = {"x": torch.randn(2, 4)}
    model = Hooked(*(nn.Linear(4, 4) for _ in range(3)))
    parted = PartedModel(model, find_split(model, given), chunks_of("model[0:2/3]", "model[2:3/3]"))
    with pytest.raises(UnsplittableError, match=r"what 0 returns has a hook.*autograd.Function"):
        parted.forward(0, given)
    model[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(UnsplittableError, match=r"1 has a backward hook.*inside of the layer"):
        parted.forward(0, given)


@pytest.mark.parametrize("name", ["llava", "qwen3-vl", "whisper"])
def test_a_model_without_memory_is_split_like_one_that_has_it(name: str):
    case = SEVERAL_MODULES[name]
    model, kwargs = case.make(), case.batch()
    split = find_split(model, kwargs)
    drop_weights(model, keep=(), whole=())
    assert find_split(model, kwargs) == split


class Watched(nn.Module):
    """Looks at its own weight for a while, as soon as another thread has asked for a chunk behind it."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, 6)
        self.entered, self.asked = threading.Event(), threading.Event()
        self.is_watching = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_watching and not isinstance(x, FakeTensor):
            self.entered.set()
            assert self.asked.wait(60)
            for _ in range(2_000):
                assert not isinstance(self.linear.weight, FakeTensor)
                self.linear(x)
        return self.linear(x)


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Watched(4), Watched(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_a_layer_returns_is_not_worked_out_while_another_thread_computes_with_its_weights():
    model = Widening()
    watched = model.layers[0]
    chunks = chunks_of("model[0:1/2]", "model[1:2/2]")
    parted = PartedModel(model, find_split(model, {"x": torch.randn(2, 4)}), chunks)
    watched.is_watching = True
    kwargs = {"x": torch.randn(7, 4)}  # rows that nobody has seen

    def second() -> torch.Tensor:
        assert watched.entered.wait(60)
        watched.asked.set()
        return parted.forward(1, kwargs, {"model": (torch.ones(7, 6),)})

    with ThreadPoolExecutor(2) as threads:
        first, other = threads.submit(parted.forward, 0, kwargs), threads.submit(second)
    assert torch.equal(first.result()["model"][0], watched.linear(kwargs["x"]))
    assert torch.equal(other.result(), model.layers[1](torch.ones(7, 6)))
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
