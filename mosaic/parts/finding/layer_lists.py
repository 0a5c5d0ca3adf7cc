"""Lists of layers in a model, and the checks that forbid to split them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.follow import TracedCall

LayerList = nn.ModuleList | nn.Sequential

_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")


class LayerListError(UnsplittableError):
    """Some lists cannot be lists of layers; the model may be split without one of them.

    Attributes:
        lists: Their names in the model.
    """

    def __init__(self, message: str, *, lists: frozenset[str]) -> None:
        super().__init__(message)
        self.lists = lists


def layer_name(path: str, index: int) -> str:
    return f"{path}.{index}" if path else str(index)


def check_model(model: nn.Module) -> None:
    """Checks properties that forbid to split a model, whatever its layers are.

    Raises:
        UnsplittableError: It normalizes over its batch, drops layers at random, or recomputes by itself.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise UnsplittableError(
                f"{name or 'the model'} is a {type(module).__name__}: its statistics are of a whole batch, "
                "microbatches would change them; use GroupNorm or LayerNorm, or freeze it by eval() after each "
                "model.train()"
            )
        for drop in _DROPS:
            rate = getattr(module, drop, getattr(getattr(module, "config", None), drop, 0.0))
            if isinstance(rate, float) and rate > 0 and module.training:
                raise UnsplittableError(
                    f"{name or 'the model'} skips layers at random ({drop}={rate}); a schedule has to know which "
                    f"layers run: set {drop} to 0"
                )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsplittableError(
                f"{name or 'the model'} is compiled by torch.jit, which hides its layers; pass the module "
                "that was compiled"
            )
        if plain := [key for key, value in vars(module).items() if f"{key}_orig" in module._parameters]:
            raise UnsplittableError(
                f"a hook makes {plain[0]} of {name or 'the model'}, which no rank could do without it; use "
                "torch.nn.utils.parametrizations, whose norms are part of the module"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UnsplittableError(
                f"{name or 'the model'} has gradient_checkpointing=True; parts choose themselves which layers are "
                "recomputed: call gradient_checkpointing_disable() and give strategies"
            )


def candidates(model: nn.Module, chosen: Mapping[str, str] | None) -> dict[str, LayerList]:
    """Returns lists that may be lists of layers, by name in the model; the outermost of nested ones.

    Raises:
        UnsplittableError: A list chosen by hand does not exist, is not a list, or holds another.
    """
    if chosen is not None:
        return _chosen(model, chosen)
    return _lists(model, alike=True) or _lists(model, alike=False)


def _chosen(model: nn.Module, chosen: Mapping[str, str]) -> dict[str, LayerList]:
    lists: dict[str, LayerList] = {}
    for name, path in chosen.items():
        try:
            layers = model.get_submodule(path)
        except AttributeError:
            layers = None
        if not isinstance(layers, LayerList) or not len(layers):
            raise UnsplittableError(
                f"modules[{name!r}]={path!r} is no list of layers of this model; name a ModuleList or a Sequential as "
                "named_modules() does"
            )
        lists[path] = layers
    for path in lists:
        for other in lists:
            if path != other and (path == "" or other.startswith(f"{path}.")):
                raise UnsplittableError(
                    f"the list {other!r} is inside of the list {path!r}; a layer runs as a whole: name one of them"
                )
    return lists


def _lists(model: nn.Module, *, alike: bool) -> dict[str, LayerList]:
    lists: dict[str, LayerList] = {}
    for path, module in model.named_modules():
        if not isinstance(module, LayerList) or len(module) < 2:
            continue
        if any(path.startswith(f"{outer}.") or outer == "" for outer in lists):
            continue
        with_weights = all(any(True for _ in layer.parameters()) for layer in module)
        if not alike or (with_weights and len({type(layer) for layer in module}) == 1):
            lists[path] = module
    return lists


def is_chain(calls: Sequence[tuple[int, TracedCall]]) -> bool:
    """Returns True if most calls of a list's elements read the result of the previous call."""
    pairs = list(itertools.pairwise(calls))
    linked = sum(any(value.site == before for value in call.values) for (before, _), (_, call) in pairs)
    return len(pairs) > 0 and 2 * linked >= len(pairs)


def check_chain(path: str, count: int, calls: Sequence[tuple[int, TracedCall]]) -> None:
    """Raises LayerListError unless a list's layers were each called once, in their order."""
    prefix = f"{path}." if path else ""
    order = [int(call.path.removeprefix(prefix)) for _, call in calls]
    for place, layer in enumerate(order):
        line = calls[place][1].line
        if layer in order[:place]:
            raise LayerListError(
                f"layer {layer} of {path or 'the model'!r} is called a second time at {line}; each layer may run once "
                "a microbatch: give each call layers of its own, or name other lists by modules=",
                lists=frozenset([path]),
            )
        if place and layer < order[place - 1]:
            raise LayerListError(
                f"layer {layer} of {path or 'the model'!r} is called behind layer {order[place - 1]} at {line}; layers "
                "have to run in the order of their list: sort the list",
                lists=frozenset([path]),
            )
    if missing := sorted(set(range(count)) - set(order)):
        raise LayerListError(
            f"layer {missing[0]} of {path or 'the model'!r} was not called with the sample, others were "
            f"(at {calls[0][1].line}); every layer has to run with every microbatch: take it out of the list",
            lists=frozenset([path]),
        )
