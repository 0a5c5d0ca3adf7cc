"""Finding modules and edges by one traced step."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engine_cases import FAST, Doing, Glued, TwoTowers, pair_batch, tower
from torch import nn

import mosaic
from mosaic.engine import find_modules
from mosaic.errors import UnsupportedModelError


def edges(finding) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in finding.graph.edges}


class Chain(nn.Module):
    """Two encoders, glue, a backbone, two heads."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.image = encoder if encoder is not None else tower()
        self.sound = tower()
        self.backbone = tower(16, 16)
        self.heads = nn.ModuleDict({"mask": tower(16, 16), "label": tower(16, 16)})

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        joined = torch.zeros(12, 16)
        joined[:6] = nn.functional.normalize(self.image(x), dim=-1)
        joined[6:] = self.sound(y).relu() * 2
        hidden = self.backbone(joined)
        return {name: head(hidden.clone().mean(0, keepdim=True)) for name, head in self.heads.items()}


CHAIN = {("image", "backbone"), ("sound", "backbone"), ("backbone", "heads.mask"), ("backbone", "heads.label")}


def test_edges_are_followed_through_glue_and_module_dicts():
    finding = find_modules(Chain(), pair_batch())
    assert finding.graph.names == ("image", "sound", "backbone", "heads.mask", "heads.label")
    assert edges(finding) == CHAIN


def test_what_was_found_holds_inputs_and_nothing_of_the_graph_that_made_them():
    model, saved = Chain(), []
    for part in model.modules():
        if isinstance(part, nn.Linear):  # autograd saves its input
            part.register_forward_pre_hook(lambda _, args: saved.append(weakref.ref(args[0])))
    finding = find_modules(model, pair_batch())
    gc.collect()
    held = {id(tensor) for subject in finding.subjects for tensor in subject.args}
    assert all(ref() is None or id(ref()) in held for ref in saved)
    inputs = {subject.name: subject.args[0] for subject in finding.subjects}
    assert {name: (x.grad_fn, x.requires_grad) for name, x in inputs.items()} == {
        name: (None, name not in ("image", "sound")) for name in finding.graph.names
    }


def test_a_module_whose_result_leaves_by_the_back_door_runs_in_place_and_is_named():
    seen: list[torch.Tensor] = []

    def peeking(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.clear()
        product = self.left(x) @ self.right(y).T
        return product + seen[0].mean()

    model = Glued(peeking)
    model.left[0].register_forward_hook(lambda module, args, result: seen.append(result))
    finding = find_modules(model, pair_batch())
    assert "made inside of it is used outside" in finding.in_place["left"]
    assert finding.in_place.keys() == finding.local.keys() == {"left"}


def test_dependencies_go_on_through_a_module_that_is_left_out():
    model = Glued(lambda self, x: self.right(self.middle((self.left(x), object()))), right=tower(16, 16))
    model.middle = Doing(lambda self, given: self.layers(given[0]), 16)
    finding = find_modules(model, pair_batch()[0])
    assert edges(finding) == {("left", "right")}
    assert "may hide tensors" in finding.left_out["middle"]


def test_a_module_that_runs_only_with_what_its_parent_sets_is_left_out_unless_it_is_named():
    def conditioned(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.middle.condition = self.left(x)
        result = self.middle(self.right(y))
        self.middle.condition = None
        return result

    def middle(self: Doing, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.condition)

    model = Glued(conditioned)
    model.middle = Doing(middle, 16)
    options = mosaic.Options(profiling=FAST, cache=None)
    with pytest.raises(UnsupportedModelError, match="'middle' failed at every quota"):
        mosaic.colocate(model, pair_batch(), modules=["middle", "left"], options=options)
    handle = mosaic.colocate(model, pair_batch(), options=options)
    assert handle.graph.names == ("left", "right")
    assert "not placed: middle: called alone, with its arguments, it raised AttributeError" in handle.describe()


def test_modules_that_take_or_return_nested_tensors_are_left_out():
    def nested(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor(list(x.split([2, 4])), layout=torch.jagged)

    def between(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = torch.cat(list(self.middle(self.left(x)).unbind()))
        return rows + self.right(y) + self.left_again(nested(x)).values()

    model = Glued(between, Doing(lambda self, x: nested(self.layers(x))))
    model.middle, model.left_again = Doing(lambda self, x: self.layers(x), 16), tower()
    left_out = find_modules(model, pair_batch()).left_out
    assert left_out.keys() == {"left", "middle", "left_again"}
    assert left_out["left"] == "it returns a nested tensor"


def test_nothing_to_place_is_refused_with_the_reasons():
    with pytest.raises(UnsupportedModelError, match="found no module to place in this Linear"):
        find_modules(nn.Linear(8, 8), pair_batch()[0])
    with pytest.raises(UnsupportedModelError, match="left: excluded by the caller"):
        find_modules(TwoTowers(), pair_batch(), exclude=["left", "right"])


def test_names_and_patterns_choose_modules():
    model = Chain()
    assert find_modules(model, pair_batch(), include=["heads.mask", "image"]).graph.names == ("image", "heads.mask")
    assert find_modules(model, pair_batch(), include=["heads.?????"]).graph.names == ("heads.label",)
    finding = find_modules(model, pair_batch(), exclude=["heads.*"])
    assert finding.graph.names == ("image", "sound", "backbone")
    assert finding.left_out["heads.mask"] == "excluded by the caller"
    for misspelt in ({"include": ["image", "vision"]}, {"exclude": ["vision"]}):
        with pytest.raises(UnsupportedModelError, match="no module is named vision; the model's modules include image"):
            find_modules(model, pair_batch(), **misspelt)


def test_a_sample_that_is_no_batch_is_refused():
    with pytest.raises(TypeError, match="sample is a int"):
        find_modules(TwoTowers(), 3)
