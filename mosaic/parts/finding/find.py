"""The split of a model, from one run of a sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import forked
from mosaic.parts.blank import BlankResults
from mosaic.parts.finding.describe import describe
from mosaic.parts.finding.follow import Followed, follow
from mosaic.parts.finding.kept import check_hooked, kept_inside
from mosaic.parts.finding.layer_lists import (
    LayerList,
    LayerListError,
    candidates,
    check_chain,
    check_model,
    is_chain,
    layer_name,
)
from mosaic.parts.finding.module_state import kept_state
from mosaic.parts.split import ModelSplit, copied
from mosaic.parts.weights import StandIns, device_of, meta_buffer


def find_split(
    model: nn.Module,
    sample: Mapping[str, Any],
    *,
    modules: Mapping[str, str] | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> ModelSplit:
    """Runs a microbatch once, without gradients, and returns the split of the model.

    Random numbers, the model's state and the sample stay unchanged. The sample should have every modality: a module
    that it does not reach can neither be cut nor fed. Layers on the meta device do not run and return zeros.

    Args:
        model: The user's model.
        sample: Keyword arguments of the model.
        modules: Names of lists of layers, as in ``named_modules``, instead of the detected ones.
        loss: Loss of the model's output. Chunks then make all leaves that it reads; by default those of the last
            module.

    Raises:
        UnsplittableError: The model cannot be cut between layers, or counts in its buffers; the message has place and
            reason.
    """
    check_model(model)
    lists = candidates(model, modules)
    if modules is not None:
        return _split(model, sample, lists, modules, loss)
    first: LayerListError | None = None
    while True:
        try:
            return _split(model, sample, lists, None, loss)
        except LayerListError as problem:
            first = first or problem
            lists = _without_smallest(lists, problem.lists)
            if not lists:
                raise first from None


def _without_smallest(lists: Mapping[str, LayerList], among: Collection[str]) -> dict[str, LayerList]:
    """Returns the lists without the smallest of ``among``; none if it is at least half of all weights."""
    sizes = {path: sum(each.numel() for each in layers.parameters()) for path, layers in lists.items()}
    left_out = min(among, key=lambda path: (sizes[path], path))
    is_small = 2 * sizes[left_out] < sum(sizes.values())
    return {path: layers for path, layers in lists.items() if path != left_out} if is_small else {}


def _split(
    model: nn.Module,
    sample: Mapping[str, Any],
    lists: Mapping[str, LayerList],
    modules: Mapping[str, str] | None,
    loss: Callable[[Any], Any] | None,
) -> ModelSplit:
    sites, scopes = _watched(model, lists)
    device = device_of(model, sample)
    stand_ins = StandIns(model, inside=[layer for layers in lists.values() for layer in layers], device=device)
    blank = BlankResults(device) if stand_ins.by_name or _is_on_meta(model) else None
    if blank is not None:
        _check_buffers(model, sites)

    def run_sample(blank: BlankResults | None) -> Followed:
        with kept_state(model) as states, forked(device), stand_ins.placed():
            parameters = dict(model.named_parameters()) | stand_ins.by_name
            tensors = copied(dict(sample))
            seen = follow(model, tensors, sites=sites, scopes=scopes, parameters=parameters, blank=blank, loss=loss)
            for state in states:
                state.check(seen.is_drawn)
            return seen

    seen = run_sample(blank)
    if seen.kept is not None:
        try:
            blank_run = run_sample(BlankResults(device))
        except UnsplittableError:
            raise kept_inside(*seen.kept) from None
        seen = check_hooked(seen, blank_run)
    chains = _chains(lists, seen, by_hand=modules is not None)
    return describe(model, sample, seen, chains, _names(list(chains), modules))


def _watched(model: nn.Module, lists: Mapping[str, LayerList]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Returns the modules that may be sites, and those that hold lists."""
    layers = {layer_name(path, index) for path, list_layers in lists.items() for index in range(len(list_layers))}
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
    """Returns the number of layers of each list, in the order of calls."""
    chains: dict[str, tuple[int, int]] = {}
    for path, layers in lists.items():
        own = {layer_name(path, index) for index in range(len(layers))}
        calls = [(index, call) for index, call in enumerate(seen.calls) if call.path in own]
        if by_hand and not calls:
            raise UnsplittableError(f"no layer of {path!r} was called with the sample; give one that calls them")
        if by_hand or is_chain(calls):
            check_chain(path, len(layers), calls)
            chains[path] = calls[0][0], len(layers)
    if not chains:
        raise UnsplittableError(
            "no list of layers was found: a ModuleList or Sequential whose elements are called one after the other, "
            "each with what the one before returned; name it by modules={'text': 'model.layers'}"
        )
    return {path: count for path, (_, count) in sorted(chains.items(), key=lambda item: item[1])}


def _names(paths: list[str], modules: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a name for each list: the first word in which paths differ, or the module that holds it."""
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
