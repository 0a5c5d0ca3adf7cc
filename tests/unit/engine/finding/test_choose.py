"""The modules that are chosen are those that a person would place."""

from __future__ import annotations

import pytest
import torch
from engine_cases import Glued, pair_batch, tower
from torch import nn

from mosaic.engine import find_modules


class Layer(nn.Module):
    """A layer of two parts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix, self.widen = nn.Linear(width, width), tower(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.widen(self.mix(x)))


class Stack(nn.Module):
    """Layers in a list, called one after the other."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Modalities(nn.Module):
    """Two encoders before a language model."""

    def __init__(self, layers: int, vision: int = 1, audio: int = 1) -> None:
        super().__init__()
        self.vision, self.audio, self.language = Stack(vision), Stack(audio), Stack(layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.language(self.vision(x) + self.audio(y))


class Within(nn.Module):
    """A model in another one."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(*inputs))


def found(model: nn.Module, *inputs: torch.Tensor) -> tuple[str, ...]:
    return find_modules(model, inputs or pair_batch()).graph.names


@pytest.mark.parametrize("layers", [2, 30])
def test_small_encoders_are_placed_beside_each_other_however_large_the_language_model_is(layers: int):
    assert found(Modalities(layers)) == ("vision", "audio", "language")


def test_a_stack_stays_whole_in_a_wrapper_and_its_layers_are_all_that_a_model_has_to_offer():
    assert found(Within(Stack(6), nn.Linear(8, 40)), pair_batch()[0]) == ("model", "head")
    assert found(Stack(3), pair_batch()[0]) == ("layers.0", "layers.1", "layers.2")


class Hearing(nn.Module):
    """A language model with an encoder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.audio, self.language = Stack(2), Stack(6)

    def forward(self, seen: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.language(seen + self.audio(y))


def test_an_encoder_that_does_not_need_what_its_module_waits_for_is_placed_by_itself():
    model = Glued(lambda self, x, y: self.right(self.left(x), y), Stack(2), Hearing())
    assert found(model) == ("left", "right.audio", "right.language")


class Seeing(nn.Module):
    """An encoder whose last layer norm others call, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.norm = nn.Linear(8, 8), Stack(3), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encoder(self.embed(x))
        return hidden, self.norm(hidden[:1])


def test_what_holds_a_part_that_is_used_outside_is_placed_without_that_part():
    def forward(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, first = self.left(x)
        return self.left.norm(hidden) @ self.right(y).T + first.sum()

    finding = find_modules(Glued(forward, Seeing(), Stack(3)), pair_batch())
    assert finding.graph.names == ("left.encoder", "right")
    assert not finding.left_out
    finding = find_modules(Glued(forward, Seeing(), Stack(3)), pair_batch(), include=["left", "right"])
    assert finding.graph.names == ("right",)
    assert finding.left_out["left"].startswith("its parameter norm.bias is used outside of it too")
