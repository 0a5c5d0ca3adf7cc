"""Models that cannot be cut are refused with the line and the way out."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from part_models import tokens, whisper
from torch import nn
from torch.utils.checkpoint import checkpoint

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.find import find_split


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


class Kept(Layers):
    """Keeps a tensor of a layer's inside."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = x * 2
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(0, 1, count=2)
        self.layers = nn.ModuleList(Kept.Layer(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.layers[0].kept


class Passing(Layers):
    """Passes one object to all layers, which write into it."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor, shared: Any, write: Callable[[Any, torch.Tensor], Any]) -> torch.Tensor:
            write(shared, x)
            return super().forward(x)

    def __init__(self, make: Callable[[], Any], write: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(count=2)
        self.layers, self.make, self.write = nn.ModuleList(Passing.Layer(4, 4) for _ in range(2)), make, write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.make()
        for layer in self.layers:
            x = layer(x, shared, self.write)
        return x


class Counted(Layers):
    """Its layers return a number, too."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return super().forward(x), len(x.sum(-1).nonzero())

    def __init__(self) -> None:
        super().__init__(count=2)
        self.layers = nn.ModuleList(Counted.Layer(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, count = layer(x)
            x = x / (1 + count)
        return x


class Wrapped(Layers):
    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=super().forward(x).sum())


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


class Between(Layers):
    """Does something between its layers."""

    def __init__(self, act: Callable[[Between, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(count=3)
        self.act = act
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.total = 0, torch.zeros(4)
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return self.layers[2](self.act(self, x))


def counts(model: Between, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x / model.calls


class Calls:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Between, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / self.calls


def replaces_its_mean(model: Between, x: torch.Tensor) -> torch.Tensor:
    model.mean = 0.9 * model.mean + x.detach().mean(0)
    return x - model.mean


def adds_to_its_total(model: Between, x: torch.Tensor) -> torch.Tensor:
    return x - model.total.add_(x.detach().mean(0))


def calls_with_other_weights(model: Between, x: torch.Tensor) -> torch.Tensor:
    layer = model.layers[0]
    return torch.func.functional_call(layer, {name: 2 * one for name, one in layer.named_parameters()}, x)


def clamps_a_weight(model: Between, x: torch.Tensor) -> torch.Tensor:
    model.layers[0].weight.clamp_(-1, 1)
    return x


def takes_a_gradient(model: Between, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(model.layers[0](y).sum(), y)[0]


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of torch.jit, in other words in each version
        return nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), X))


X = torch.zeros(2, 4)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "twice": (
        lambda: Layers(0, 1, 2, 0, 1, 2),
        "3 layers of 'layers' run in the order 0, 1, 2, 0, 1, 2 .*test_unspl.*give each call",
    ),
    "order": (lambda: Layers(2, 1, 0), "'layers' run in the order 2, 1, 0 .*sort the list"),
    "skipped": (lambda: Layers(0, 2), "'layers' run in the order 0, 2 .*take out what does not run"),
    "at random": (lambda: Layers(0, 1, 2, skip=0.5), r"skips layers at random \(layerdrop=0.5\).*set layerdrop to 0"),
    "kept": (Kept, "made inside of layers.0 is used outside of it at .*test_unspl.*return it"),
    "list argument": (
        lambda: Passing(lambda: [1, 2], lambda shared, x: shared.pop()),
        r"layers\.0, called at .*test_unspl.*writes into a list among its arguments, .*return what the layer keeps",
    ),
    "counter in an argument": (
        lambda: Passing(lambda: SimpleNamespace(depth=0), lambda shared, x: setattr(shared, "depth", shared.depth + 1)),
        "writes into a SimpleNamespace among its arguments",
    ),
    "cache": (
        lambda: Passing(SimpleNamespace, lambda shared, x: vars(shared).setdefault(str(len(vars(shared))), x)),
        "writes into a SimpleNamespace among its arguments, .*use_cache=False",
    ),
    "number of a layer": (Counted, "layers.1, called at .*test_unspl.*returns a number .*return a tensor"),
    "draws by values": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.RReLU()) for _ in range(2))),
        "0 draws random numbers by rrelu_with_noise, as many as its values say",
    ),
    "output": (lambda: Wrapped(0, 1, 2), "returns a SimpleNamespace, in which .*register a dataclass"),
    "circle": (Circle, "feed each other in a circle.*name others by modules="),
    "counter": (lambda: Between(counts), "the model changes its calls when .*let the loop change it"),
    "buffer replaced": (lambda: Between(replaces_its_mean), "the model changes its mean"),
    "other weights": (
        lambda: Between(calls_with_other_weights),
        r"layers\.0 is called by .* with other weights than its own, at .*test_unspl.*change weights within",
    ),
    "buffer written": (
        lambda: Between(lambda model, x: x + model.mean.add_(x.detach().mean(0))),
        "buffer mean is written into at .*test_unspl.*or a buffer the module that holds it",
    ),
    "weight written": (
        lambda: Between(clamps_a_weight),
        r"parameter layers\.0\.weight is written into at .*test_unspl.*behind the optimizer's step",
    ),
    "attribute written": (
        lambda: Between(adds_to_its_total),
        "tensor among the model's attributes is written into at .*test_unspl",
    ),
    "counter in an object": (lambda: Between(Calls()), "the model changes its calls when it is called"),
    "own generator": (
        lambda: Between(lambda model, x: x + torch.rand(4, generator=model.generator)),
        "the model changes its generator when it is called",
    ),
    "lazy": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), "1 has weights without a shape; call the model"),
    "gradient": (lambda: Between(takes_a_gradient), "gradients are computed between layers at .*test_unspl"),
    "rows": (
        lambda: Between(lambda model, x: x[x[:, 0] > -100]),
        r"the number of rows follows from values or draws at .*test_unspl.*, and layers.2 is called later",
    ),
    "results kept": (
        lambda: Between(lambda model, x: [x, setattr(model, "seen", [x])][0]),
        "the model changes its seen when it is called",
    ),
    "hook on a tensor": (
        lambda: Between(lambda model, x: [x, x.register_hook(lambda gradient: None)][0]),
        r"cannot be followed: .*it raises RuntimeError: cannot register a hook.*test_unspl.*torch\.no_grad",
    ),
    "checkpoint": (
        lambda: Between(lambda model, x: checkpoint(model.layers[0], x, use_reentrant=False)),
        "layers.0 is called by torch.utils.checkpoint, .* give strategies",
    ),
    "script": (traced, "1 is compiled by torch.jit.*pass the module"),
    "norm by a hook": (
        lambda: nn.Sequential(nn.Linear(4, 4), torch.nn.utils.spectral_norm(nn.Linear(4, 4))),
        "1 has a hook that makes its weight.*parametrizations",
    ),
    "no list": (lambda: nn.Linear(4, 4), "no list of layers was found.*modules="),
    "batchnorm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        "1 is a BatchNorm1d.*GroupNorm or LayerNorm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused(name: str):
    make, message = REFUSED[name]
    model = make()
    with pytest.raises(UnsplittableError, match=message):
        find_split(model, {next(iter(inspect.signature(model.forward).parameters)): X})


def test_writes_into_arguments_are_refused_without_weights_too():
    own_cache = type("Cache", (list,), {"get_seq_length": list.__len__})
    for make in (list, own_cache):
        with pytest.raises(UnsplittableError, match=f"Layer, run without its weights, writes into a {make.__name__}"):
            find_split(Passing(make, lambda shared, x: shared.append(x)).to("meta"), {"x": X})


def test_lists_named_by_hand_are_checked():
    model = whisper()
    sample = {"input_features": torch.randn(2, 4, 12), "decoder_input_ids": tokens()}
    by_hand = {"speech": "model.encoder.layers", "text": "model.decoder.layers"}
    assert [module.name for module in find_split(model, sample, modules=by_hand).modules] == ["speech", "text"]
    with pytest.raises(UnsplittableError, match=r"has 'model\.encoder\.blocks', which is no list of layers"):
        find_split(model, sample, modules={"speech": "model.encoder.blocks"})
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(UnsplittableError, match=r"2 layers of '0' run in the order .*and no more"):
        find_split(nested, {"input": X}, modules={"outer": "", "inner": "0"})
