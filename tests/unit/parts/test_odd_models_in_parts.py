"""Chunks do all that models do beside calling layers one after the other."""

from __future__ import annotations

import contextvars
import copy
import random
from collections.abc import Callable
from typing import Any
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
Make = Callable[[], nn.Module]


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def layers(count: int = 3, layer: Make = linear) -> nn.ModuleList:
    return nn.ModuleList(layer() for _ in range(count))


def module(**parts: Callable[[], Any]) -> Callable[[Callable[..., Any]], Make]:
    """Makes of a forward a function that makes a module with these parts; tensors that do not train are buffers."""

    def decorate(forward: Callable[..., Any]) -> Make:
        def make() -> nn.Module:
            made = type(forward.__name__, (nn.Module,), {"forward": forward})()
            for name, part in parts.items():
                value = part()
                if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                    made.register_buffer(name, value)
                else:
                    setattr(made, name, value)
            return made

        return make

    return decorate


@module(start=linear, drop=lambda: nn.Dropout(0.0), layers=layers, token=lambda: nn.Parameter(torch.ones(4)))
def unmoved(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Hands what a dropout of rate 0 returns, which is its argument, and the argument itself to later layers."""
    made = self.start(x) + self.token
    x = dropped = self.drop(made)
    for layer in self.layers:
        x = layer(x)
    return x + made * dropped


@module(layers=layers)
def overwritten(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes into its input."""
    x *= 2
    for layer in self.layers:
        x = layer(x)
    return x


SCALE = contextvars.ContextVar("scale", default=1.0)


@module(layers=layers)
def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads a variable of its thread."""
    token = SCALE.set(2 * SCALE.get())
    for layer in self.layers:
        x = layer(x) * SCALE.get()
    SCALE.reset(token)
    return x


@module(cell=lambda: nn.LSTM(4, 4, batch_first=True), stride=lambda: torch.tensor(2))
def strided_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.cell(x)[0][:, :: int(self.stride)]


@module(layers=lambda: layers(3, strided_layer))
def strided(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has recurrent layers, and layers whose shape follows from a buffer."""
    x = x[:, None].expand(-1, 9, -1)
    for layer in self.layers:
        x = layer(x)
    return x


@module(scale=lambda: nn.Parameter(torch.full((4,), 0.5)), calls=lambda: torch.zeros(()))
def writing_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x.mul_(3).exp() * self.scale * float(self.calls)


@module(layers=lambda: layers(3, writing_layer))
def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has layers that write into what they are given, and into a buffer."""
    x = x * 0.1
    for layer in self.layers:
        x = layer(x * 0.1)
    return x


@module(linear=linear)
def adding_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.add_(self.linear(x.clone()))


@module(layers=lambda: layers(3, adding_layer))
def aliased(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has layers that return what they were given, and reads both names of it."""
    seen = [x * 1]
    for layer in self.layers:
        seen.append(layer(seen[-1]))
        seen.append(seen[-1].clone())
    return sum(one * number for number, one in enumerate(seen))


@module(linear=linear)
def filling_layer(self: Any, held: dict[str, Any]) -> dict[str, Any]:
    held["depth"] += 1
    held["x"] = held["x"] + self.linear(held["x"]) / held["depth"]
    return held


@module(layers=lambda: layers(3, filling_layer))
def filled(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has layers that write into a dict, and reads it in place of what they return."""
    held = {"x": x, "depth": 0}
    for layer in self.layers:
        layer(held)
    return held["x"] / held["depth"]


@module(layers=lambda: nn.ModuleDict({f"layer_{at}": nn.ModuleList([linear()]) for at in range(3)}))
def nested(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has lists in a dict, which it does not call."""
    for (layer,) in self.layers.values():
        x = x + layer(x).tanh()
    return x


@module(norm=lambda: nn.LayerNorm(4), linear=linear)
def normed_layer(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + self.linear(self.norm(x)), (x > 0).sum(0)


@module(layers=lambda: layers(3, normed_layer))
def reused(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls a module of its first layer at the end, too, and stacks layers' counts, which the loss does not read."""
    counts = []
    for layer in self.layers:
        x, count = layer(x)
        counts.append(count)
    self.counts = torch.stack(counts)
    return self.layers[0].norm(x)


@module(linear=linear, places=lambda: torch.arange(4.0))
def placed_start(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) + self.places


@module(start=placed_start, layers=layers)
def places(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads a buffer of its first module at the end."""
    x = self.start(x)
    for layer in self.layers:
        x = layer(x)
    return x * self.start.places


@module(layers=layers, head=lambda: layers(2))
def heads(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Predicts offsets in each of many ways by one small list of layers that it calls again and again."""
    found = []
    for layer in self.layers:
        x = y = layer(x)
        for part in self.head:
            y = part(y)
        found.append(y)
    return torch.stack(found)


def masked(decides: bool) -> Make:
    """Layers that read a mask which a module makes; with ``decides`` only if there is something to mask."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = (self.gate(x) > -100)[torch.arange(len(x))]
        if decides and bool(mask.all()):
            mask = torch.ones_like(mask)
        for layer in self.layers:
            x = layer(x * mask)
        return x

    return module(gate=linear, layers=layers)(forward)


@module(layers=layers)
def noisy(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Hands the same random numbers to several layers."""
    noise = nn.functional.dropout(torch.ones_like(x), 0.5)
    for layer in self.layers:
        x = layer(x) + noise
    return x


@module(routers=lambda: layers(3), blocks=lambda: layers(3))
def zipped(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes elements of two lists in turn; one of them is named by hand."""
    for router, block in zip(self.routers, self.blocks, strict=True):
        x = x + router(x).sigmoid() * block(x)
    return x


def test_modules_of_a_list_beside_the_named_one_run_with_its_layers():
    model, kwargs = zipped(), {"x": torch.randn(2, 4)}
    with pytest.raises(UnsplittableError, match="does, make one list whose layers hold and call an element"):
        find_split(model, kwargs)
    split = find_split(model, kwargs, modules={"model": "blocks"})
    check_cut(case_of(lambda: model), model, split, THIRDS, kwargs)


def test_a_number_that_python_reads_behind_all_modules_reaches_the_output():
    @module(a=lambda: layers(2), b=lambda: layers(2))
    def scaled_by_another(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.a:
            x = layer(x)
        for layer in self.b:
            y = layer(y)
        return y * float(x.detach().square().sum())

    model, kwargs = scaled_by_another(), {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    split = find_split(model, kwargs)
    assert split.feeds == (("a", "b"),)
    check_cut(case_of(lambda: model), model, split, ("a[0:2/2]", "b[0:2/2]"), kwargs)


def test_a_module_that_reads_several_lists_runs_where_it_is_needed():
    @module(a=lambda: layers(2), b=lambda: layers(2), embed=linear, look=linear, join=linear, fuse=linear)
    def fused(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.a:
            x = layer(x)
        y = self.look(self.embed(y) + x)  # reads one list, and another's input
        for index, layer in enumerate(self.b):
            y = layer(y if index == 0 else self.fuse(self.join(x) + y) + y)
        return x + y

    model, kwargs = fused(), {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    split = find_split(model, kwargs)
    assert split.feeds == (("a", "b"),)
    own = {site.path: (site.module, site.layer) for site in split.sites}
    assert (own["look"], own["join"], own["fuse"]) == (("b", 0), ("a", 1), ("b", 1))
    check_cut(case_of(lambda: model), model, split, ("a[0:1/2]", "a[1:2/2]", "b[0:1/2]", "b[1:2/2]"), kwargs)


@module(embed=linear, layers=layers, scale=lambda: nn.Parameter(torch.ones(4)))
def shaped(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers that use a module's result for its shape alone, and a parameter between them."""
    first = hidden = self.embed(x)
    for index, layer in enumerate(self.layers):
        hidden = layer(hidden + torch.zeros_like(first))
        if index == 1:
            hidden *= self.scale
    return hidden


def activated_layer(writes: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=writes), nn.Linear(8, 4))


@module(layers=lambda: nn.ModuleList(map(activated_layer, (True, False, True))))
def activated(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has layers of which some write into the result of a product."""
    for layer in self.layers:
        x = layer(x).tanh()
    return x


def test_layers_that_write_into_products_are_recomputed_as_a_whole():
    torch.manual_seed(3)
    model = activated()
    case = case_of(lambda: model)
    split = find_split(model, case.batch())
    assert [site.may_select for site in split.sites if site.is_layer] == [False, True, False]
    with mock.patch("mosaic.parts.chunk_call.create_selective_checkpoint_contexts", wraps=selected) as contexts:
        check_cut(case, model, split, THIRDS, case.batch(), strategy="selective")
    assert contexts.call_count == 1


def case_of(make: Make) -> PartedCase:
    return PartedCase(
        make=make,
        batch=lambda: {"x": torch.randn(2, 4)},
        cuts=(THIRDS, THIRDS),
        loss=lambda output: output.square().sum(),
    )


@pytest.mark.parametrize(
    "make",
    [
        unmoved,
        overwritten,
        scaled,
        strided,
        in_place,
        aliased,
        filled,
        nested,
        reused,
        places,
        heads,
        masked(False),
        masked(True),
        noisy,
        shaped,
    ],
)
def test_what_models_do_between_layers_leaves_gradients_equal(make: Make):
    check_equal(case_of(make))


@module(linear=linear)
def drawing_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) * float(np.random.rand())


@module(layers=lambda: layers(3, drawing_layer))
def masks(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Draws masks with numpy, between its layers and inside of them."""
    for layer in self.layers:
        x = layer(x) + random.random()
    return x * torch.from_numpy(np.random.rand(4)).float()


def test_numbers_of_numpy_and_of_python_are_the_plain_loops():
    model, x = masks(), torch.randn(2, 4)
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
            rank.boundary_like(0, {"x": x})
            sent = rank.forward(index, {"x": x}, sent, draws="all")
        assert torch.equal(sent, wanted)


@module(linear=linear)
def set_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) * self.scale


@module(layers=lambda: layers(3, set_layer))
def sets_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        layer.scale = x.mean().item() + 2
    for layer in self.layers:
        x = layer(x)
    for layer in self.layers:
        del layer.scale
    return x


def test_a_layer_whose_attribute_the_model_sets_keeps_its_activations():
    split = find_split(sets_layers(), {"x": torch.randn(2, 4)})
    assert all(site.has_effects for site in split.sites if site.is_layer)


@module(made=linear, layers=layers)
def tells_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    made = self.made(x)
    for layer in self.layers:
        layer.told = made
        x = layer(x)
    return x


def test_layers_without_weights_need_the_results_that_are_their_attributes():
    sites = find_split(tells_layers().to("meta"), {"x": torch.randn(2, 4)}).sites
    assert all((0, 0) in site.needs for site in sites if site.is_layer)


def pair(joins: bool) -> nn.Module:
    """Two towers; both results are returned, or their product once a module has changed the first one's."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.a:
            x = layer(x)
        for layer in self.b:
            y = layer(y)
        return (self.join(x) * y,) if joins else (x, y)

    return module(a=lambda: layers(2), b=lambda: layers(2), join=linear)(forward)()


@pytest.mark.parametrize(("joins", "first", "last"), [(True, "b", "a"), (False, "a", "b")])
def test_a_loss_may_read_what_another_module_makes(joins: bool, first: str, last: str):
    def loss(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return sum((one.square().sum() for one in output), torch.zeros(()))

    model, kwargs = pair(joins), {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    split = find_split(model, kwargs, loss=loss)
    assert split.feeds == ((first, last),)
    case = PartedCase(make=lambda: model, batch=dict, cuts=(), loss=loss)
    begins, ends = (f"{first}[0:1/2]", f"{first}[1:2/2]"), (f"{last}[0:1/2]", f"{last}[1:2/2]")
    for cut in ((*begins, *ends), (begins[0], f"{begins[1]}+{ends[0]}", ends[1])):
        check_cut(case, model, split, cut, kwargs)


@module(layers=lambda: layers(3), head=linear)
def with_hidden(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for layer in self.layers:
        x = layer(x)
    return x, self.head(x)


def test_a_loss_gets_all_that_the_last_chunk_makes_even_if_it_reads_less_without_gradients():
    def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden, score = output
        return score.square().sum() + (hidden.sum() if hidden.requires_grad else 0)

    model, kwargs = with_hidden(), {"x": torch.randn(2, 4)}
    split = find_split(model, kwargs, loss=loss)
    assert split.output_leaves == ("[0]", "[1]")
    check_cut(PartedCase(make=lambda: model, batch=dict, cuts=(), loss=loss), model, split, THIRDS, kwargs)


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
    with pytest.raises(UnsplittableError, match=r"made inside of 1\.0 is used outside of it at a forward hook"):
        find_split(model, {"input": torch.zeros(2, 4)})


@module(weight=lambda: nn.Parameter(torch.ones(4)))
def pick(self: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (x * self.weight)[rows] if rows.dtype is torch.bool else (x * self.weight)[: int(rows.max())]


@module(pick=pick, layers=layers)
def selects(self: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Keeps only the rows that a mask names, or so many as a number says, before its layers."""
    x = self.pick(x, rows)
    for layer in self.layers:
        x = layer(x)
    return x


@pytest.mark.parametrize(
    ("sample", "others"), [([True, False, True], ([True] * 3, [False, False, True])), ([1, 2], ([3], [1]))]
)
def test_shapes_that_follow_from_values_are_worked_out_for_each_microbatch(sample: list[int], others: list[list[int]]):
    model = selects()
    x = torch.randn(3, 4)
    split = find_split(model, {"x": x, "rows": torch.tensor(sample)})
    case = PartedCase(make=lambda: model, batch=dict, cuts=(), loss=torch.sum)
    rank = PartedModel(copy.deepcopy(model), split, chunks_of(*THIRDS), own=[2])
    for rows in others:
        batch = {"x": x, "rows": torch.tensor(rows)}
        assert rank.boundary_like(0, batch)["model"][0].shape == (sum(rows), 4)
        check_cut(case, model, split, THIRDS, batch)
