"""Finding where a model can be cut, by one run of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from mosaic.errors import UnsplittableError
from mosaic.parts.follow import Followed, SeenCall, follow
from mosaic.parts.layer_lists import candidates, check_chain, check_model, is_chain
from mosaic.parts.owners import Owner, assign_owners, check_order, check_random_numbers
from mosaic.parts.random_state import kept_random_state
from mosaic.parts.split import ModelSplit, Site, SplitModule


def find_split(model: nn.Module, sample: Mapping[str, Any], *, modules: Mapping[str, str] | None = None) -> ModelSplit:
    """Runs a microbatch once, without gradients, and returns where the model can be cut.

    Random numbers and buffers are left as they were. The sample should have every modality: what it does not reach
    can neither be cut nor fed.

    Args:
        model: The user's model, with its weights.
        sample: Keyword arguments of the model.
        modules: Names for lists of layers, as ``named_modules`` gives them, where they are not to be found.

    Raises:
        UnsplittableError: The model cannot be cut between layers; the message says where and why.
    """
    check_model(model)
    lists = candidates(model, modules)
    sites, scopes = _watched(model, lists)
    with _kept_buffers(model), kept_random_state(_devices(model)):
        seen = follow(model, sample, sites=sites, scopes=scopes)
    chains = _chains(lists, seen, by_hand=modules is not None)
    names = _names(list(chains), modules)
    owners = assign_owners(seen.calls, chains)
    output, kept = _output(seen, owners)
    sites_seen = [*zip(owners, seen.calls, strict=True), output]
    check_order(sites_seen)
    check_random_numbers(sites_seen)
    return ModelSplit(
        modules=_modules(chains, names, sites_seen, seen, sample),
        sites=tuple(_site(model, owner, call, chains, names) for owner, call in sites_seen),
        output_leaves=kept,
        idle_parameters=_idle(model, sites_seen, chains, names),
    )


def _watched(model: nn.Module, lists: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Returns what may be a site, and what holds lists."""
    layers = [f"{path}.{index}" if path else str(index) for path, found in lists.items() for index in range(len(found))]
    sites: dict[str, nn.Module] = {}
    scopes: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if path in layers:
            sites[path] = module
        elif any(path.startswith(f"{layer}.") for layer in layers):
            continue
        elif path == "" or any(layer.startswith(f"{path}.") for layer in layers):
            scopes[path] = module
        elif next(module.parameters(), None) is not None or isinstance(module, _DropoutNd):
            sites[path] = module
    return sites, scopes


def _chains(lists: Mapping[str, nn.Module], seen: Followed, *, by_hand: bool) -> dict[str, int]:
    found: dict[str, int] = {}
    for path, layers in lists.items():
        own = {f"{path}.{index}" if path else str(index) for index in range(len(layers))}
        calls = [(index, call) for index, call in enumerate(seen.calls) if call.path in own]
        if by_hand or is_chain(calls):
            if not calls:
                raise UnsplittableError(f"no layer of {path!r} was called with the sample; give one that calls them")
            check_chain(path, len(layers), calls)
            found[path] = len(layers)
    if not found:
        raise UnsplittableError(
            "no list of layers was found: a ModuleList or Sequential whose elements are called one after the other, each "
            "with what the one before returned; name it by modules={'text': 'model.layers'}"
        )
    first = {call.path: index for index, call in reversed(list(enumerate(seen.calls)))}
    return dict(sorted(found.items(), key=lambda item: first[f"{item[0]}.0" if item[0] else "0"]))


def _names(paths: list[str], modules: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a name for each list: where its path differs from others', or what holds it."""
    if modules is not None:
        return {path: name for name, path in modules.items()}
    words = [path.split(".") for path in paths]
    common = 0
    while len(paths) > 1 and all(len(w) > common + 1 for w in words) and len({w[common] for w in words}) == 1:
        common += 1
    if len(paths) == 1:
        return {paths[0]: words[0][-2] if len(words[0]) > 1 else "model"}
    short = [w[common] for w in words]
    return dict(zip(paths, short if len(set(short)) == len(paths) else paths, strict=True))


def _output(seen: Followed, owners: list[Owner]) -> tuple[tuple[Owner, SeenCall], tuple[str, ...]]:
    """Returns the output as a call of the module that ends last, and which of its leaves that module makes."""
    last = owners[-1][0]
    call = SeenCall(path="", call=0, line="")
    kept: list[str] = []
    for name, leaf in seen.output.items():
        if not leaf.values or any(owners[value.site][0] == last for value in leaf.values):
            kept.append(name)
            call.values |= leaf.values
            call.parameters |= leaf.parameters
            call.inputs |= leaf.inputs
    end = max(layer for path, layer in owners if path == last)
    return ((last, end), call), tuple(kept)


def _site(model: nn.Module, owner: Owner, call: SeenCall, chains: Mapping[str, int], names: Mapping[str, str]) -> Site:
    path, layer = owner
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = model.get_submodule(call.path).parameters() if call.path else ()
    return Site(
        path=call.path,
        call=call.call,
        module=names[path],
        layer=layer,
        is_layer=call.path in {f"{path}.{i}" if path else str(i) for i in range(chains[path])},
        needs=frozenset(call.values),
        parameters=frozenset(call.parameters) | {first_names[id(parameter)] for parameter in inside},
        keeps_shape=call.keeps_shape,
        form=call.form,
    )


def _modules(
    chains: Mapping[str, int],
    names: Mapping[str, str],
    sites: list[tuple[Owner, SeenCall]],
    seen: Followed,
    sample: Mapping[str, Any],
) -> tuple[SplitModule, ...]:
    read: dict[str, set[str]] = {path: set() for path in chains}
    for (path, _), call in sites:
        read[path] |= call.inputs
    for scope, inputs in seen.scoped_inputs.items():
        inside = [path for path in chains if not scope or path == scope or path.startswith(f"{scope}.")]
        if len(inside) == 1:
            read[inside[0]] |= inputs
    found = []
    for path, count in chains.items():
        inputs = tuple(name for name in sample if name in read[path])
        others = set().union(*(read[other] for other in chains if other != path))
        own = tuple(name for name in inputs if name not in others)
        found.append(SplitModule(name=names[path], path=path, count=count, inputs=inputs, own_inputs=own))
    return tuple(found)


def _idle(
    model: nn.Module, sites: list[tuple[Owner, SeenCall]], chains: Mapping[str, int], names: Mapping[str, str]
) -> dict[str, str]:
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    used = {name for _, call in sites for name in call.parameters}
    for _, call in sites:
        if call.path:
            used |= {first_names[id(parameter)] for parameter in model.get_submodule(call.path).parameters()}
    order = list(chains)
    idle = [name for name in first_names.values() if name not in used]
    return {name: names[max(order, key=lambda path: (_shared_words(name, path), order.index(path)))] for name in idle}


def _shared_words(name: str, path: str) -> int:
    pairs = list(zip(name.split("."), path.split("."), strict=False))
    return next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))


def _devices(model: nn.Module) -> set[torch.device]:
    return {parameter.device for parameter in model.parameters()}


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
