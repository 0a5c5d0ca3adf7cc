"""Times and bytes of the user's own layers, for planning: counted on the sample, in proportion to data elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.cost.counting.count import KernelsOf, count_module
from mosaic.cost.counts import ModuleCounts
from mosaic.cost.roofline import phase_ms
from mosaic.errors import UnsupportedModelError
from mosaic.find.random_numbers import forked
from mosaic.graph import Part
from mosaic.hardware import Hardware
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import count_units
from mosaic.parts.split import ModelSplit, SplitModule
from mosaic.parts.strategies import is_cache, without_cache
from mosaic.pipelining.workload.counted import CountedLayers, CountedMicrobatch, CountedModule, scaled_layer
from mosaic.pipelining.workload.layers import Feed, Layer, PipelineModel, Strategy
from mosaic.profile import Phase
from mosaic.ranks.pipeline.random_numbers import DrawnNumbers

STATE_BYTES = 16
"""Of a parameter that trains: itself, its gradient, and AdamW's two moments, in float32."""


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A model as planning sees it."""

    split: ModelSplit
    """Where it can be cut."""
    whole: PartedModel
    """With each module's first layer as a chunk, for the shapes behind it; keeps all weights."""
    layers: Mapping[str, tuple[Layer, ...]]
    """By module, of the sample."""
    elements: Mapping[str, int]
    """By module, of the sample: of what leaves its first layer."""
    model: PipelineModel
    """Its modules."""
    numbers: DrawnNumbers
    """Which microbatches draw random numbers: encoders are called with all of these, since pieces would draw others."""
    units_together: int = 1
    """Of an encoder, that no piece divides: as many as there are context ranks, each of which encodes one."""

    def microbatch(self, kwargs: Mapping[str, Any]) -> CountedMicrobatch:
        """Returns what a microbatch is to planning."""
        present, draws = self.split.present(kwargs), self.numbers.draw(kwargs)
        counted = {}
        for index, module in enumerate(self.split.modules):
            if module.name not in present:
                continue
            elements, num_bytes = _size(self.whole, index, kwargs)
            is_cut = module.name in self.split.encoders and not draws
            units = count_units(self.split, kwargs, module.name) if is_cut else 1
            share = elements / self.elements[module.name] if self.elements[module.name] else 1.0
            counted[module.name] = CountedLayers(
                units=max(1, units // self.units_together),
                layers=tuple(scaled_layer(one, share) for one in self.layers[module.name]),
                boundary_bytes=num_bytes,
            )
        leaves = pytree.tree_leaves_with_path(dict(kwargs))
        given = [(pytree.keystr(path), one) for path, one in leaves if isinstance(one, torch.Tensor)]
        shapes = [f"{name}{tuple(one.shape)} {one.dtype}" for name, one in given]
        bounds = [f"{name} {one.boundary_bytes}" for name, one in counted.items()]  # they may follow from values
        key = " ".join((*shapes, *bounds, *["draws"] * draws))
        return CountedMicrobatch(text_tokens=1, key=key, counted=counted, draws=draws)


def count_model(model: nn.Module, split: ModelSplit, sample: Mapping[str, Any], hardware: Hardware) -> CountedModel:
    """Runs the sample once without gradients, and counts each call of a layer or another module.

    Raises:
        UnsupportedModelError: A layer cannot be counted, nor a copy of it that computes; names it.
    """
    firsts = [(Part(module=one.name, first=0, count=1, total=one.count),) for one in split.modules]
    rests = [
        (Part(module=one.name, first=1, count=one.count - 1, total=one.count),)
        for one in split.modules
        if one.count > 1
    ]
    whole = PartedModel(model, split, firsts + rests)
    calls = _calls(whole, sample)
    known: dict[Any, ModuleCounts] = {}
    layers: dict[str, list[Layer]] = {one.name: [_NOTHING] * one.count for one in split.modules}
    for site, (args, kwargs) in calls:
        module = model.get_submodule(site.path)
        alike = site.module if site.is_layer else f"{site.module} {site.path}"  # layers of a list that look alike are
        key = alike, _text(args), _text(kwargs), type(module), _makeup(module)
        if key not in known:
            known[key] = _counts(module, args, kwargs, hardware)
        layers[site.module][site.layer] = _sum(layers[site.module][site.layer], _layer(known[key], hardware))
    return CountedModel(
        split=split,
        whole=whole,
        numbers=DrawnNumbers(whole),
        layers={name: tuple(found) for name, found in layers.items()},
        elements={one.name: _size(whole, index, sample)[0] for index, one in enumerate(split.modules)},
        model=PipelineModel(
            modules=tuple(_module(model, split, one) for one in split.modules),
            feeds=tuple(Feed(source=source, target=target) for source, target in split.feeds),
        ),
    )


def _counts(module: nn.Module, args: Any, kwargs: Any, hardware: Hardware) -> ModuleCounts:
    """Counts a module on tensors without data, or where what it does follows from values, on a copy."""
    target: KernelsOf = "cuda" if hardware.kind == "cuda" else "host"
    try:
        return count_module(module, args, kwargs, target=target)
    except UnsupportedModelError:
        return count_module(module, args, kwargs, target=target, with_data=True)


_NOTHING = Layer(forward_ms=0.0, backward_ms=0.0, weights_ms=0.0, strategies=(Strategy(name="keep", kept_bytes=0),))


def _calls(whole: PartedModel, sample: Mapping[str, Any]) -> list[tuple[Any, tuple[Any, Any]]]:
    """Returns the arguments of each site's call."""
    seen: dict[tuple[str, int], tuple[Any, Any]] = {}
    counts: dict[str, int] = {}
    sites = {(site.path, site.call): site for site in whole.split.sites if site.path}

    @contextmanager
    def watching() -> Iterator[None]:
        handles = []
        for path in dict.fromkeys(path for path, _ in sites):

            def note(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                seen[path, counts.get(path, 0)] = pytree.tree_map(without_cache, (args, kwargs), is_leaf=is_cache)
                counts[path] = counts.get(path, 0) + 1

            handles.append(whole.model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    with torch.no_grad(), watching(), forked(whole.device):
        if any(one.is_meta for one in whole.model.parameters()):
            whole.skip_random_numbers(sample)  # all modules are called, and none runs
        else:
            whole.model(**whole.split.copied(sample))
    return [(sites[place], given) for place, given in seen.items() if place in sites]


def _layer(counts: ModuleCounts, hardware: Hardware) -> Layer:
    """Returns one layer; half of its backward is taken to be for weights, where matrices have most of both."""
    forward, backward = (
        phase_ms(counts.phase(phase), hardware, hardware.num_sms) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    kept = counts.memory.activation_bytes
    return Layer(
        forward_ms=forward,
        backward_ms=backward / 2,
        weights_ms=backward / 2,
        strategies=(
            Strategy(name="keep", kept_bytes=kept),
            Strategy(name="recompute", kept_bytes=0, extra_backward_ms=forward),
        ),
        workspace_bytes=counts.memory.workspace_bytes,
    )


def _sum(one: Layer, other: Layer) -> Layer:
    """Returns two as one: what is before or behind a layer is kept whatever becomes of the layer."""
    names = [strategy.name for strategy in max(one, other, key=lambda layer: len(layer.strategies)).strategies]
    return Layer(
        forward_ms=one.forward_ms + other.forward_ms,
        backward_ms=one.backward_ms + other.backward_ms,
        weights_ms=one.weights_ms + other.weights_ms,
        strategies=tuple(
            Strategy(
                name=name,
                kept_bytes=_of(one, name).kept_bytes + _of(other, name).kept_bytes,
                extra_backward_ms=_of(one, name).extra_backward_ms + _of(other, name).extra_backward_ms,
            )
            for name in names
        ),
        workspace_bytes=max(one.workspace_bytes, other.workspace_bytes),
    )


def _of(layer: Layer, name: str) -> Strategy:
    return next((one for one in layer.strategies if one.name == name), layer.strategies[0])


def _module(model: nn.Module, split: ModelSplit, module: SplitModule) -> CountedModule:
    parameters = dict(model.named_parameters())
    own = [
        [
            parameters[name]
            for name in split.parameters_of([Part(module=module.name, first=i, count=1, total=module.count)])
        ]
        for i in range(module.count)
    ]
    return CountedModule(
        name=module.name,
        trains=tuple(any(one.requires_grad for one in found) for found in own),
        parameters=tuple(sum(one.numel() for one in found) for found in own),
        resident_bytes=tuple(
            sum(one.numel() * (STATE_BYTES if one.requires_grad else one.element_size()) for one in found)
            for found in own
        ),
    )


def _size(whole: PartedModel, index: int, kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Returns elements and bytes behind a module's first layer."""
    found: Sequence[torch.Tensor] = [one for sent in whole.boundary_like(index, kwargs).values() for one in sent]
    return sum(one.numel() for one in found), sum(one.numel() * one.element_size() for one in found)


def _makeup(module: nn.Module) -> str:
    return " ".join(f"{name}{tuple(one.shape)}{one.requires_grad}" for name, one in module.named_parameters())


def _text(value: Any) -> str:
    leaves, tree = pytree.tree_flatten(value)
    return str(
        [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else str(one)[:40] for one in leaves]
    ) + str(tree)
