"""Models that cannot be cut are refused with the line and the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from chained_chunks import chunks_of
from part_models import DECODERS, WIDTH, text_batch, tokens, whisper
from torch import nn

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel


class Layers(nn.Module):
    """Calls its layers in an order that is given."""

    def __init__(self, *order: int, count: int = 3, skip: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.order = order
        self.layerdrop = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class Noise(Layers):
    """Hands the same random numbers to several layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = nn.functional.dropout(x, 0.5)
        for layer in self.layers:
            x = layer(x) + noise
        return x


class Kept(nn.Module):
    """Keeps a tensor of a layer's inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.kept: list[torch.Tensor] = []
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda module, args: None)
            layer.forward = self._keeping(layer)

    def _keeping(self, layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            self.kept.append(x * 2)
            return nn.functional.linear(x, layer.weight)

        return forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.kept[0]


class Circle(nn.Module):
    """Two lists that feed each other in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = b = x
        for left, right in zip(self.left, self.right, strict=True):
            a, b = left(a + b), right(b + a)
        return a + b


FOUR = {"x": torch.zeros(2, 4)}
REFUSED = {
    "twice": (
        lambda: Layers(0, 1, 2, 0, 1, 2),
        FOUR,
        "layer 0 of 'layers' is called a second time at .*test_unspl.*give each call",
    ),
    "order": (lambda: Layers(2, 1, 0), FOUR, "layer 1 of 'layers' is called behind layer 2 at .*sort the list"),
    "skipped": (lambda: Layers(0, 2), FOUR, "layer 1 of 'layers' was not called with the sample"),
    "at random": (
        lambda: Layers(0, 1, 2, skip=0.5),
        FOUR,
        r"skips layers at random \(layerdrop=0.5\).*set layerdrop to 0",
    ),
    "noise": (lambda: Noise(), FOUR, "random numbers drawn at .*test_unspl.* reach 2 layers.*nn.Dropout"),
    "kept": (Kept, FOUR, "made inside of layers.0 is used outside of it at .*test_unspl.*return it"),
    "circle": (Circle, FOUR, "feed each other in a circle.*name fewer lists"),
    "no list": (lambda: nn.Linear(4, 4), {"input": FOUR["x"]}, "no list of layers was found.*modules="),
    "batchnorm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        {"input": FOUR["x"]},
        "1 is a BatchNorm1d.*GroupNorm or LayerNorm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused(name: str):
    make, sample, message = REFUSED[name]
    with pytest.raises(UnsplittableError, match=message):
        find_split(make(), sample)


def test_routers_logits_that_a_loss_reads_are_refused():
    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=48,
        num_local_experts=2,
        output_router_logits=True,
        use_cache=False,
    )
    with pytest.raises(UnsplittableError, match=r"inside of model\.layers\.0 is used outside.*routers' logits"):
        find_split(transformers.MixtralForCausalLM(config), text_batch())


def test_a_model_that_recomputes_by_itself_is_refused():
    model = DECODERS["llama"].make()
    model.activation_checkpointing_enable()
    with pytest.raises(UnsplittableError, match=r"gradient_checkpointing_disable\(\) and give strategies"):
        find_split(model, text_batch())


def test_recomputing_a_layer_that_fills_a_cache_is_refused():
    model = DECODERS["llama"].make()
    batch = {**text_batch(), "use_cache": True}
    chunks = chunks_of("model[0:3/3]")
    rank = PartedModel(model, find_split(model, batch), chunks)
    assert rank.forward(0, batch).loss.isfinite()
    with pytest.raises(UnsplittableError, match=r"recomputed gets a DynamicCache.*use_cache=False"):
        rank.forward(0, batch, strategies=["recompute"] * 3)


def test_lists_named_by_hand_are_checked():
    model = whisper()
    sample = {"input_features": torch.randn(2, 4, 12), "decoder_input_ids": tokens()}
    by_hand = {"speech": "model.encoder.layers", "text": "model.decoder.layers"}
    assert [module.name for module in find_split(model, sample, modules=by_hand).modules] == ["speech", "text"]
    with pytest.raises(UnsplittableError, match=r"modules\['speech'\]='model.encoder.blocks' is no list of layers"):
        find_split(model, sample, modules={"speech": "model.encoder.blocks"})
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(UnsplittableError, match="the list '0' is inside of the list ''"):
        find_split(nested, {"input": FOUR["x"]}, modules={"outer": "", "inner": "0"})
