"""Times and bytes of the user's own layers, for planning: counted on the sample, in proportion to data elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.cost.counting.count import KernelsOf, count_module
from mosaic.cost.counts import ModuleCounts
from mosaic.errors import MosaicError, UnsplittableError, UnsupportedModelError, said_by
from mosaic.find.random_numbers import forked, random_state
from mosaic.graph import Part
from mosaic.parts.blank import is_cache, without_cache
from mosaic.parts.parted_model import PartedModel, is_alike
from mosaic.parts.pieces import count_units, join_pieces, take_units
from mosaic.parts.split import ModelSplit, SplitModule
from mosaic.pipelining.layers import (
    CountedLayers,
    CountedMicrobatch,
    CountedModule,
    Feed,
    Layer,
    PipelineModel,
    Strategy,
    scaled_layer,
)
from mosaic.pipelining.partition import strategy_of
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.pipelining.rank_layer import PLAIN_SHARING, ContextSharing, RankShare, rank_layer, rank_share
from mosaic.ranks.pipeline.random_numbers import DrawnNumbers

STATE_BYTES, MOMENT_BYTES = 8, 8
"""Of a parameter that trains: itself and its gradient, and AdamW's two moments, in float32."""


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    split: ModelSplit
    whole: PartedModel
    """With each module's first layer as a chunk, for the shapes behind it; keeps all weights."""
    layers: Mapping[str, tuple[Layer, ...]]
    """By module, of the sample."""
    elements: Mapping[str, int]
    """By module, of the sample: of what leaves its first layer."""
    model: PipelineModel
    numbers: DrawnNumbers
    """Random numbers of microbatches: encoders run those that draw any whole, since pieces would draw others."""
    repeats: bool
    """False if the model gave other results when it was called again with the sample."""
    machine: RankHardware
    shares: Mapping[str, RankShare]
    """By module, of the sample: the part of it on one context rank."""
    units_together: int = 1
    """Of an encoder, that no piece divides: as many as there are context ranks, each of which encodes one."""

    def microbatch(self, kwargs: Mapping[str, Any]) -> CountedMicrobatch:
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
                layers=tuple(scaled_layer(layer, share) for layer in self.layers[module.name]),
                boundary_bytes=round(num_bytes * self.shares[module.name].rows / self.machine.degrees.tensor),
            )
        leaves = pytree.tree_leaves_with_path(dict(kwargs))
        tensors = [(pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
        shapes = [f"{name}{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
        bounds = [f"{name} {layers.boundary_bytes}" for name, layers in counted.items()]  # they may follow from values
        device = self.whole.device.type
        precision = [str(torch.get_autocast_dtype(device))] * torch.is_autocast_enabled(device)
        key = " ".join((*shapes, *bounds, *precision, *["draws"] * draws))
        return CountedMicrobatch(key=key, counted=counted, draws=draws)


def count_model(
    model: nn.Module,
    split: ModelSplit,
    sample: Mapping[str, Any],
    machine: RankHardware,
    sharing: ContextSharing = PLAIN_SHARING,
    *,
    offload: bool = False,
) -> CountedModel:
    """Runs the sample once without gradients, and counts each call of a layer or another module.

    Equal layers are counted once. A model on the meta device may be of any size. Sharing of sequences assumes that
    backbones have causal attention.
    """
    firsts = [(Part(module=module.name, first=0, count=1, total=module.count),) for module in split.modules]
    rests = [
        (Part(module=module.name, first=1, count=module.count - 1, total=module.count),)
        for module in split.modules
        if module.count > 1
    ]
    whole = PartedModel(model, split, firsts + rests)
    calls, repeats = _calls(whole, sample)
    numbers = DrawnNumbers(whole)
    split = replace(split, dependent=_dependent(whole, sample, draws=numbers.draw(sample)))
    sizes = {module.name: _size(whole, index, sample) for index, module in enumerate(split.modules)}
    shares = {
        module.name: _share(whole, index, sample, machine, sharing, has_items=module.name in split.encoders)
        for index, module in enumerate(split.modules)
    }
    counted: dict[Any, ModuleCounts] = {}
    layers = {module.name: [list[Layer]() for _ in range(module.count)] for module in split.modules}
    for site, (args, kwargs) in calls:
        module = model.get_submodule(site.path)
        alike = site.module if site.is_layer else f"{site.module} {site.path}"  # layers of a list that look alike are
        weights = [(name, each.shape, each.requires_grad) for name, each in module.named_parameters()]
        key = alike, _text(args), _text(kwargs), type(module), tuple(weights)
        if key not in counted:
            counted[key] = _counts(module, args, kwargs, machine)
        layer = rank_layer(
            counted[key],
            machine,
            hidden_bytes=sizes[site.module][1] if site.is_layer else 0,
            trains=any(parameter.requires_grad for parameter in module.parameters()),
            share=shares[site.module],
            may_recompute=not site.has_effects,
            may_select=site.is_layer and site.may_select,
            may_offload=site.is_layer and offload,
        )
        if not site.is_layer:  # what is before or behind a layer is kept whatever becomes of the layer
            layer = replace(layer, strategies=layer.strategies[:1])
        layers[site.module][site.layer].append(layer)
    return CountedModel(
        split=split,
        whole=whole,
        numbers=numbers,
        repeats=repeats,
        layers={name: tuple(map(_sum, own)) for name, own in layers.items()},
        elements={name: elements for name, (elements, _) in sizes.items()},
        model=PipelineModel(
            modules=tuple(_module(model, split, each, machine) for each in split.modules),
            feeds=tuple(Feed(source=source, target=target) for source, target in split.feeds),
        ),
        machine=machine,
        shares=shares,
    )


def _share(
    whole: PartedModel,
    index: int,
    sample: Mapping[str, Any],
    machine: RankHardware,
    sharing: ContextSharing,
    *,
    has_items: bool,
) -> RankShare:
    """Returns a module's part on one context rank, from the shape behind its first layer."""
    if machine.degrees.context == 1 and sharing.mask is None:
        return RankShare()
    hidden = next(sent[0] for sent in whole.boundary_like(index, sample).values())
    sequences, tokens = hidden.shape[:2] if hidden.dim() > 2 else (1, hidden.shape[0])
    return rank_share(
        sharing, machine.degrees, sequences=sequences, tokens=tokens, is_causal=not has_items, has_items=has_items
    )


def _counts(module: nn.Module, args: Any, kwargs: Any, machine: RankHardware) -> ModuleCounts:
    """Counts a module on tensors without data, or where what it does follows from values, on a copy."""
    target: KernelsOf = "cuda" if machine.cluster.hardware.kind == "cuda" else "host"
    try:
        return count_module(module, args, kwargs, target=target)
    except UnsupportedModelError:
        return count_module(module, args, kwargs, target=target, with_data=True)


def _calls(whole: PartedModel, sample: Mapping[str, Any]) -> tuple[list[tuple[Any, tuple[Any, Any]]], bool]:
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

    outputs = []
    with torch.no_grad(), watching(), forked(whole.device):
        if not any(parameter.is_meta for parameter in whole.model.parameters()):
            outputs = [_run(whole, sample) for _ in range(2)]
        try:
            whole.skip_random_numbers(sample)  # all modules are called, and none runs
        except MosaicError:
            raise
        except Exception as error:  # of any kind: it is the user's code that runs
            raise UnsplittableError(
                f"between layers, where ranks have zeros for results of others, the model raises {said_by(error)}: let "
                "the module that makes such a result compute with it, too"
            ) from error
        if outputs and not random_state(whole.device).is_same(outputs[0][1]):
            raise UnsplittableError(
                "random numbers are drawn in a way that ranks cannot repeat without the layers that draw, such as "
                "behind torch.manual_seed in one: draw them in the loop, and pass them as arguments"
            )
    repeats = is_alike(outputs[:1], outputs[1:], rtol=1e-4 if whole.device.type == "cpu" else 1e-2)
    return [(sites[place], arguments) for place, arguments in seen.items() if place in sites], repeats


def _dependent(whole: PartedModel, sample: Mapping[str, Any], *, draws: bool) -> frozenset[str]:
    """Returns the encoders that return something else for pieces of a microbatch, such as those that norm over it."""
    split, model = whole.split, whole.model
    if any(parameter.is_meta for parameter in model.parameters()):
        return frozenset()  # they cannot run
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, is_training in modes:
            module.training = is_training and not draws
        with torch.no_grad(), forked(whole.device):
            return frozenset(name for name in split.encoders if not _has_units(whole, sample, name))
    finally:
        for module, is_training in modes:
            module.training = is_training


def _has_units(whole: PartedModel, sample: Mapping[str, Any], name: str) -> bool:
    """Runs an encoder with units that differ, at once and in two pieces."""

    def run(kwargs: Mapping[str, Any]) -> Any:
        sent = None
        for index in (index for index, chunk in enumerate(whole.chunks) if chunk[0].module == name):
            sent = whole.forward(index, kwargs, sent)
        return sent[name] if sent is not None else ()

    def differing(tensor: torch.Tensor) -> torch.Tensor:
        shares = torch.linspace(1, 0.5, len(tensor), dtype=tensor.dtype, device=tensor.device)
        return tensor * shares.view(-1, *(1 for _ in tensor.shape[1:]))

    try:
        units = count_units(whole.split, sample, name)
        kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: differing(tensor) if tensor.is_floating_point() and tensor.ndim else tensor,
            take_units(whole.split, sample, name, range(units) if units > 1 else (0, 0)),
        )
        halves = range(units // 2 or 1), range(units // 2 or 1, max(2, units))
        at_once = run(kwargs)
        pieces = join_pieces([run(take_units(whole.split, kwargs, name, half)) for half in halves])
    except Exception:  # of any kind: a part may be refused by the model's own code, which then takes whole microbatches
        return False
    is_exact = whole.device.type == "cpu" and all(tensor.element_size() > 2 for tensor in at_once)
    return is_alike(at_once, pieces, rtol=1e-4 if is_exact else 1e-2)


def _run(whole: PartedModel, sample: Mapping[str, Any]) -> Any:
    with forked(whole.device):
        return whole.model(**whole.split.copied(sample)), random_state(whole.device)


def _sum(calls: Sequence[Layer]) -> Layer:
    """Returns the calls of modules that run with one layer as one, with the layer's strategies."""
    most = max((call.strategies for call in calls), key=len, default=(Strategy(name="keep", kept_bytes=0),))
    return Layer(
        forward_ms=sum(call.forward_ms for call in calls),
        backward_ms=sum(call.backward_ms for call in calls),
        weights_ms=sum(call.weights_ms for call in calls),
        strategies=tuple(
            Strategy(
                name=name,
                kept_bytes=sum(strategy_of(call, name).kept_bytes for call in calls),
                extra_forward_ms=sum(strategy_of(call, name).extra_forward_ms for call in calls),
                extra_backward_ms=sum(strategy_of(call, name).extra_backward_ms for call in calls),
                workspace_bytes=max(strategy_of(call, name).workspace_bytes for call in calls),
            )
            for name in (strategy.name for strategy in most)
        ),
        workspace_bytes=max((call.workspace_bytes for call in calls), default=0),
    )


def _module(model: nn.Module, split: ModelSplit, module: SplitModule, machine: RankHardware) -> CountedModule:
    parameters, degrees = dict(model.named_parameters()), machine.degrees
    state_bytes = STATE_BYTES + MOMENT_BYTES / (degrees.data * degrees.context)
    own = [
        [
            parameters[name]
            for name in split.parameters_of([Part(module=module.name, first=i, count=1, total=module.count)])
        ]
        for i in range(module.count)
    ]
    return CountedModule(
        name=module.name,
        trains=tuple(any(parameter.requires_grad for parameter in layer) for layer in own),
        parameters=tuple(sum(parameter.numel() for parameter in layer) for layer in own),
        resident_bytes=tuple(
            round(
                sum(each.numel() * (state_bytes if each.requires_grad else each.element_size()) for each in layer)
                / degrees.tensor
            )
            for layer in own
        ),
    )


def _size(whole: PartedModel, index: int, kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Returns elements and bytes behind a module's first layer."""
    likes: Sequence[torch.Tensor] = [like for sent in whole.boundary_like(index, kwargs).values() for like in sent]
    return sum(like.numel() for like in likes), sum(like.numel() * like.element_size() for like in likes)


def _text(value: Any) -> str:
    leaves, tree = pytree.tree_flatten(value)
    return str(
        [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else str(leaf)[:40] for leaf in leaves]
    ) + str(tree)
