"""Finding where a model can be cut, by one run of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from mosaic.errors import UnsplittableError
from mosaic.parts.blank import BlankResults
from mosaic.parts.finding.describe import describe
from mosaic.parts.finding.follow import Followed, follow
from mosaic.parts.finding.layer_lists import LayerList, candidates, check_chain, check_model, is_chain, layer_name
from mosaic.parts.random_state import kept_random_state
from mosaic.parts.split import ModelSplit
from mosaic.parts.weights import StandIns, device_of, meta_buffer


def find_split(model: nn.Module, sample: Mapping[str, Any], *, modules: Mapping[str, str] | None = None) -> ModelSplit:
    """Runs a microbatch once, without gradients, and returns where the model can be cut.

    Random numbers and buffers are left as they were. The sample should have every modality: a module that it does not
    reach can neither be cut nor fed. Where weights are on the meta device, layers are not run, and what they would
    return is zeros.

    Args:
        model: The user's model.
        sample: Keyword arguments of the model.
        modules: Names for lists of layers, as ``named_modules`` gives them, where others are to be cut than are found.

    Raises:
        UnsplittableError: The model cannot be cut between layers, or counts something in its buffers; the message says
            where and why.
    """
    check_model(model)
    lists = candidates(model, modules)
    sites, scopes = _watched(model, lists)
    device = device_of(model, sample)
    stand_ins = StandIns(model, inside=[layer for layers in lists.values() for layer in layers], device=device)
    blank = BlankResults(device) if stand_ins.by_name or _is_on_meta(model) else None
    if blank is not None:
        _check_buffers(model, sites)
    with _kept_buffers(model), kept_random_state(device), stand_ins.placed():
        parameters = dict(model.named_parameters()) | stand_ins.by_name
        seen = follow(model, sample, sites=sites, scopes=scopes, parameters=parameters, blank=blank)
    chains = _chains(lists, seen, by_hand=modules is not None)
    return describe(model, sample, seen, chains, _names(list(chains), modules))


def _watched(model: nn.Module, lists: Mapping[str, LayerList]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Returns what may be a site, and what holds lists."""
    layers = {layer_name(path, index) for path, found in lists.items() for index in range(len(found))}
    sites: dict[str, nn.Module] = {}
    scopes: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        words = path.split(".")
        if path in layers:
            sites[path] = module
        elif any(".".join(words[:count]) in layers for count in range(1, len(words))):
            continue
        elif path == "" or any(layer.startswith(f"{path}.") for layer in layers):
            scopes[path] = module
        elif next(module.parameters(), None) is not None or isinstance(module, _DropoutNd):
            sites[path] = module
    return sites, scopes


def _chains(lists: Mapping[str, LayerList], seen: Followed, *, by_hand: bool) -> dict[str, int]:
    """Returns the lists of layers, with their layers, in the order in which they are called."""
    found: dict[str, tuple[int, int]] = {}
    for path, layers in lists.items():
        own = {layer_name(path, index) for index in range(len(layers))}
        calls = [(index, call) for index, call in enumerate(seen.calls) if call.path in own]
        if by_hand and not calls:
            raise UnsplittableError(f"no layer of {path!r} was called with the sample; give one that calls them")
        if by_hand or is_chain(calls):
            check_chain(path, len(layers), calls)
            found[path] = calls[0][0], len(layers)
    if not found:
        raise UnsplittableError(
            "no list of layers was found: a ModuleList or Sequential whose elements are called one after the other, "
            "each with what the one before returned; name it by modules={'text': 'model.layers'}"
        )
    return {path: count for path, (_, count) in sorted(found.items(), key=lambda item: item[1])}


def _names(paths: list[str], modules: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a name for each list: where its path differs from others', or what holds it."""
    if modules is not None:
        return {path: name for name, path in modules.items()}
    words = [path.split(".") for path in paths]
    if len(paths) == 1:
        return {paths[0]: words[0][-2] if len(words[0]) > 1 else "model"}
    common = 0
    while all(len(w) > common + 1 for w in words) and len({w[common] for w in words}) == 1:
        common += 1
    short = [w[common] for w in words]
    return dict(zip(paths, short if len(set(short)) == len(paths) else paths, strict=True))


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _check_buffers(model: nn.Module, sites: Mapping[str, nn.Module]) -> None:
    inside = {id(module) for site in sites.values() for module in site.modules()}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and id(module) not in inside:
                raise meta_buffer(f"{path}.{name}")


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Puts buffers back as they were.

    Raises:
        UnsplittableError: One that belongs into checkpoints was changed, such as a running average.
    """
    before = [
        (f"{path}.{name}" if path else name, module, name, buffer, buffer.detach().clone())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    changed = []
    try:
        yield
        for full_name, module, name, buffer, value in before:
            now = module._buffers.get(name)
            if name not in module._non_persistent_buffers_set and not buffer.is_meta:
                changed += [] if now is not None and _alike(now, value) else [(full_name, type(module).__name__)]
    finally:
        with torch.no_grad():
            for _, module, name, buffer, value in before:
                module._buffers[name] = buffer.copy_(value)
    if changed:
        raise UnsplittableError(
            f"{changed[0][0]} of a {changed[0][1]} changes with each forward, as running averages do; microbatches run "
            "in another order in a pipeline, and layers that are made again run twice: freeze it by eval() of its "
            "module, or update it in the loop, between steps"
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
