"""Lists of layers in a model, and the checks that forbid to split them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.follow import TracedCall

LayerList = nn.ModuleList | nn.Sequential

_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")


def layer_name(path: str, index: int) -> str:
    return f"{path}.{index}" if path else str(index)


def check_model(model: nn.Module) -> None:
    """Checks properties that forbid to split a model, whatever its layers are.

    Raises:
        UnsplittableError: It normalizes over its batch, drops layers at random, or recomputes by itself.
    """
    for name, module in model.named_modules():
        for reason in _obstacles(module):
            raise UnsplittableError(f"{name or 'the model'} {reason}")


def _obstacles(module: nn.Module) -> Iterator[str]:
    if isinstance(module, _BatchNorm) and module.training:
        yield (
            f"is a {type(module).__name__}: its statistics are of a whole batch, microbatches would change them; use "
            "GroupNorm or LayerNorm, or freeze it by eval() after each model.train()"
        )
    for drop in _DROPS:
        rate = getattr(module, drop, getattr(getattr(module, "config", None), drop, 0.0))
        if isinstance(rate, float) and rate > 0 and module.training:
            yield (f"skips layers at random ({drop}={rate}); a schedule has to know which layers run: set {drop} to 0")
    if isinstance(module, torch.jit.ScriptModule):
        yield "is compiled by torch.jit, which hides its layers; pass the module that was compiled"
    for name in vars(module):
        if f"{name}_orig" in module._parameters:
            yield (
                f"has a hook that makes its {name}, which no rank could do without it; use "
                "torch.nn.utils.parametrizations, whose norms are part of the module"
            )
    if getattr(module, "gradient_checkpointing", False) is True:
        yield (
            "has gradient_checkpointing=True; parts choose themselves which layers are recomputed: call "
            "gradient_checkpointing_disable() and give strategies"
        )


def find_lists(model: nn.Module, chosen: Mapping[str, str] | None) -> dict[str, LayerList]:
    """Returns lists that may be lists of layers, by name in the model; the outermost of nested ones.

    Without a choice these are lists of at least two modules of one class with parameters, or, where there are none,
    all lists of at least two modules.

    Raises:
        UnsplittableError: A list chosen by hand does not exist, is not a list, or holds another.
    """
    modules = dict(model.named_modules())
    lists = {path: module for path, module in modules.items() if isinstance(module, LayerList) and len(module)}
    if chosen is None:
        several = {path: layers for path, layers in lists.items() if len(layers) > 1}
        return _outermost({path: layers for path, layers in several.items() if _is_uniform(layers)} or several)
    for name, path in chosen.items():
        if path not in lists:
            raise UnsplittableError(
                f"modules[{name!r}]={path!r} is no list of layers of this model; name a ModuleList or a Sequential as "
                "named_modules() does"
            )
    named = {path: lists[path] for path in chosen.values()}
    for path in named.keys() - _outermost(named).keys():
        outer = next(other for other in named if path != other and is_inside(path, other))
        raise UnsplittableError(
            f"the list {path!r} is inside of the list {outer!r}; a layer runs as a whole: name one of them"
        )
    return named


def is_inside(path: str, outer: str) -> bool:
    return outer == "" or path.startswith(f"{outer}.")


def _outermost(lists: Mapping[str, LayerList]) -> dict[str, LayerList]:
    return {
        path: layers
        for path, layers in lists.items()
        if not any(is_inside(path, other) for other in lists if other != path)
    }


def _is_uniform(layers: LayerList) -> bool:
    have_weights = all(next(layer.parameters(), None) is not None for layer in layers)
    return have_weights and len({type(layer) for layer in layers}) == 1


def is_chain(calls: Sequence[tuple[int, TracedCall]]) -> bool:
    """Returns True if most calls of a list's elements read the result of the previous call."""
    pairs = list(itertools.pairwise(calls))
    linked = sum(any(value.site == before for value in call.values) for (before, _), (_, call) in pairs)
    return len(pairs) > 0 and 2 * linked >= len(pairs)


def disorder(path: str, count: int, calls: Sequence[TracedCall]) -> str | None:
    """Returns why a list is no list of layers: they are not called once each, in their order."""
    order = [int(call.path.rpartition(".")[2]) for call in calls]
    owner = path or "the model"
    for place, layer in enumerate(order):
        line = calls[place].line
        if layer in order[:place]:
            return (
                f"layer {layer} of {owner!r} is called a second time at {line}; each layer may run once a microbatch: "
                "give each call layers of its own, or name other lists by modules="
            )
        if place and layer < order[place - 1]:
            return (
                f"layer {layer} of {owner!r} is called behind layer {order[place - 1]} at {line}; layers have to run "
                "in the order of their list: sort the list"
            )
    if missing := sorted(set(range(count)) - set(order)):
        return (
            f"layer {missing[0]} of {owner!r} was not called with the sample, others were (at {calls[0].line}); every "
            "layer has to run with every microbatch: take it out of the list"
        )
    return None
