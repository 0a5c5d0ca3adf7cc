"""Chunks do all that models do beside calling layers one after the other."""

from __future__ import annotations

import contextvars
import copy
import random
from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from part_models import WIDTH, PartedCase, chunks_of, text_batch
from parted_equality import check_cut, check_equal
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selected

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import forked, random_state
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.weights import drop_weights

CPU = torch.device("cpu")
THIRDS = ("model[0:1/3]", "model[1:2/3]", "model[2:3/3]")


def layers(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(count))


class Unmoved(nn.Module):
    """Hands what a dropout of rate 0 returns, which is its argument, and the argument itself to later layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.drop, self.layers = nn.Linear(4, 4), nn.Dropout(0.0), layers()
        self.token = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.start(x) + self.token
        x = dropped = self.drop(made)
        for layer in self.layers:
            x = layer(x)
        return x + made * dropped


class Overwritten(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= 2
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Module):
    """Reads a variable of its thread."""

    scale = contextvars.ContextVar("scale", default=1.0)

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token = self.scale.set(2 * self.scale.get())
        for layer in self.layers:
            x = layer(x) * self.scale.get()
        self.scale.reset(token)
        return x


class Strided(nn.Module):
    """Has recurrent layers, and layers whose shape follows from a buffer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(4, 4, batch_first=True)
            self.register_buffer("stride", torch.tensor(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(x)[0][:, :: int(self.stride)]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Strided.Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None].expand(-1, 9, -1)
        for layer in self.layers:
            x = layer(x)
        return x


class InPlace(nn.Module):
    """Has layers that write into what they are given, and into a buffer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((4,), 0.5))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x.mul_(3).exp() * self.scale * float(self.calls)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlace.Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 0.1
        for layer in self.layers:
            x = layer(x * 0.1)
        return x


class Heads(nn.Module):
    """Predicts offsets in each of many ways by one small list of layers that it calls again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = layers(), layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            x = y = layer(x)
            for part in self.head:
                y = part(y)
            found.append(y)
        return torch.stack(found)


class Masked(nn.Module):
    """Layers that read a mask which a module makes; with ``decides`` only if there is something to mask."""

    def __init__(self, *, decides: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.layers = layers()
        self.decides = decides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.gate(x) > -100
        if self.decides and bool(mask.all()):
            mask = torch.ones_like(mask)
        for layer in self.layers:
            x = layer(x * mask)
        return x


class Shaped(nn.Module):
    """Layers that use a module's result for its shape alone, and a parameter between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = layers()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden + torch.zeros_like(first))
            if index == 1:
                hidden *= self.scale
        return hidden


class Activated(nn.Module):
    """Has layers of which some write into the result of a product."""

    class Layer(nn.Module):
        def __init__(self, *, writes: bool) -> None:
            super().__init__()
            self.up, self.down, self.writes = nn.Linear(4, 8), nn.Linear(8, 4), writes

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.relu(self.up(x), inplace=self.writes))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Activated.Layer(writes=writes) for writes in (True, False, True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_layers_that_write_into_products_are_recomputed_as_a_whole():
    torch.manual_seed(3)
    model = Activated()
    case = case_of(lambda: model)
    split = find_split(model, case.batch())
    assert [site.may_select for site in split.sites if site.is_layer] == [False, True, False]
    with mock.patch("mosaic.parts.chunk_call.create_selective_checkpoint_contexts", wraps=selected) as contexts:
        check_cut(case, model, split, THIRDS, case.batch(), strategy="selective")
    assert contexts.call_count == 1


def case_of(make: Callable[[], nn.Module]) -> PartedCase:
    return PartedCase(
        make=make,
        batch=lambda: {"x": torch.randn(2, 4)},
        cuts=(THIRDS, THIRDS),
        loss=lambda output: output.square().sum(),
    )


@pytest.mark.parametrize(
    "make", [Unmoved, Overwritten, Scaled, Strided, InPlace, Heads, Masked, partial(Masked, decides=True), Shaped]
)
def test_what_models_do_between_layers_leaves_gradients_equal(make: Callable[[], nn.Module]):
    check_equal(case_of(make))


class Masks(nn.Module):
    """Draws masks with numpy, between its layers and inside of them."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(np.random.rand())

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masks.Layer(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + random.random()
        return x * torch.from_numpy(np.random.rand(4)).float()


def test_numbers_of_numpy_and_of_python_are_the_plain_loops():
    model, x = Masks(), torch.randn(2, 4)
    with forked(CPU):
        before = random_state(CPU)
        wanted, after = model(x), random_state(CPU)
        split = find_split(model, {"x": x})
        ranks = [PartedModel(copy.deepcopy(model), split, chunks_of(*THIRDS), own=[index]) for index in range(3)]
        sent = {}
        for index, rank in enumerate(ranks):
            before.restore()
            rank.skip_random_numbers({"x": x})
            assert random_state(CPU).is_same(after)
            before.restore()
            sent = rank.forward(index, {"x": x}, sent, draws="all")
        assert torch.equal(sent, wanted)


class Pair(nn.Module):
    """Two towers; both results are returned, or their product once a module has changed the first one's."""

    def __init__(self, *, joins: bool) -> None:
        super().__init__()
        self.a, self.b, self.join = layers(2), layers(2), nn.Linear(4, 4)
        self.joins = joins

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.a:
            x = layer(x)
        for layer in self.b:
            y = layer(y)
        return (self.join(x) * y,) if self.joins else (x, y)


@pytest.mark.parametrize(("joins", "first", "last"), [(True, "b", "a"), (False, "a", "b")])
def test_a_loss_may_read_what_another_module_makes(joins: bool, first: str, last: str):
    def loss(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return sum((one.square().sum() for one in output), torch.zeros(()))

    model, kwargs = Pair(joins=joins), {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    split = find_split(model, kwargs, loss=loss)
    assert split.feeds == ((first, last),)
    case = PartedCase(make=lambda: model, batch=dict, cuts=(), loss=loss)
    begins, ends = (f"{first}[0:1/2]", f"{first}[1:2/2]"), (f"{last}[0:1/2]", f"{last}[1:2/2]")
    for cut in ((*begins, *ends), (begins[0], f"{begins[1]}+{ends[0]}", ends[1])):
        check_cut(case, model, split, cut, kwargs)


def experts() -> nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=48,
        num_local_experts=2,
        output_router_logits=True,
        router_aux_loss_coef=1.0,
    )
    return transformers.MixtralForCausalLM(config)


def test_routers_logits_that_hooks_keep_for_a_loss_are_refused_with_and_without_weights():
    empty = experts()
    drop_weights(empty, keep=(), whole=())
    for model in (experts(), empty):
        with pytest.raises(UnsplittableError, match=r"made inside of .* is used outside .*output_router_logits"):
            find_split(model, text_batch())


def test_a_hook_inside_of_a_layer_is_refused_where_the_layer_has_no_weights():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))).to("meta")
    model[1][0].register_forward_hook(lambda module, args, result: None)
    with pytest.raises(UnsplittableError, match="made inside of 1 is used outside of it at a forward hook"):
        find_split(model, {"input": torch.zeros(2, 4)})


class Selects(nn.Module):
    """Keeps only the rows that a mask names, before its layers."""

    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return (x * self.weight)[rows]

    def __init__(self) -> None:
        super().__init__()
        self.pick = Selects.Pick()
        self.layers = layers()

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = self.pick(x, rows)
        for layer in self.layers:
            x = layer(x)
        return x


def test_shapes_that_follow_from_values_are_worked_out_for_each_microbatch():
    model = Selects()
    x = torch.randn(3, 4)
    split = find_split(model, {"x": x, "rows": torch.tensor([True, False, True])})
    case = PartedCase(make=lambda: model, batch=dict, cuts=(), loss=torch.sum)
    rank = PartedModel(copy.deepcopy(model), split, chunks_of(*THIRDS), own=[2])
    for rows in ([True, True, True], [False, False, True]):
        batch = {"x": x, "rows": torch.tensor(rows)}
        assert rank.boundary_like(0, batch)["model"][0].shape == (sum(rows), 4)
        check_cut(case, model, split, THIRDS, batch)
