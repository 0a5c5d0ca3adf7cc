"""The split of a model, from one run of a sample: each call assigned to a layer, and what crosses between layers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import forked
from mosaic.find.restore import Objects, restored_objects
from mosaic.parts.blank import BlankResults
from mosaic.parts.finding.follow import TracedCall, TracedRun, follow, kept_inside, sources
from mosaic.parts.finding.layer_lists import (
    LayerList,
    LayerListError,
    candidates,
    check_chain,
    check_model,
    is_chain,
    layer_name,
)
from mosaic.parts.parted_model import kind_of
from mosaic.parts.split import ModelSplit, Site, SplitModule, copied
from mosaic.parts.weights import StandIns, device_of, meta_buffer


def describe(
    model: nn.Module,
    sample: Mapping[str, Any],
    run: TracedRun,
    chains: Mapping[str, int],
    names: Mapping[str, str],
) -> ModelSplit:
    """Returns the split; ``chains`` has the number of layers of each list, by its name in the model, and ``names`` has
    the name of its parts."""
    owners = assign_owners(run.calls, chains)
    sites = list(zip(owners, run.calls, strict=True))
    output, output_leaves = _output(run, owners, order_modules(sites, list(chains))[-1])
    owned = [*sites, output]
    order = order_modules(owned, list(chains))
    check_values_between(owned)
    parameters = _parameters(model, owned)
    return ModelSplit(
        kind=kind_of(sample),
        modules=_modules({path: chains[path] for path in order}, names, owned, run, list(sample)),
        sites=tuple(
            Site(
                path=call.path,
                call=call.call,
                module=names[path],
                layer=layer,
                is_layer=call.path == layer_name(path, layer),
                needs=frozenset(call.values),
                parameters=used,
                keeps_shape=call.keeps_shape,
                has_effects=call.has_effects,
                may_select=call.may_select and not call.has_effects,
                form=call.form,
            )
            for ((path, layer), call), used in zip(owned, parameters, strict=True)
        ),
        output_leaves=output_leaves,
        written_inputs=tuple(sorted(run.written_inputs)),
        idle_parameters=_idle(model, frozenset().union(*parameters), chains, names),
    )


def _output(run: TracedRun, owners: list[Owner], last: str) -> tuple[_Owned, tuple[str, ...]]:
    """Returns the output as a call of the last module, and the names of its leaves.

    These are the leaves that the loss reads, and others that exist at that module's end; without a loss all its leaves.
    """
    end = last, max(layer for path, layer in owners if path == last)
    call = run.loss or TracedCall(path="", call=0, line="")
    names: list[str] = []
    for name, labels in run.output.items():
        makers = {owners[value.site] for value in sources(labels, "value")}
        by_last = run.loss is None and any(path == last for path, _ in makers)
        is_inside = bool(sources(labels, "inside"))
        if name in sources(call.labels, "output") or (not is_inside and (makers <= {end} or by_last)):
            names.append(name)
            call.labels |= labels
    return (end, call), tuple(names)


def _parameters(model: nn.Module, owned: Sequence[_Owned]) -> list[frozenset[str]]:
    """Returns the first names of the parameters of each call."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_call = []
    for _, call in owned:
        inside = model.get_submodule(call.path).parameters() if call.path else ()
        by_call.append(frozenset(sources(call.labels, "parameter")) | {names[id(parameter)] for parameter in inside})
    return by_call


def _modules(
    chains: Mapping[str, int],
    names: Mapping[str, str],
    owned: Sequence[_Owned],
    run: TracedRun,
    tensors: Sequence[str],
) -> tuple[SplitModule, ...]:
    read: dict[str, set[str]] = {path: set() for path in chains}
    for (path, _), call in owned:
        read[path] |= sources(call.labels, "input")
    for scope, inputs in run.scoped_inputs.items():
        inside = [path for path in chains if not scope or path.startswith(f"{scope}.")]
        if len(inside) == 1:
            read[inside[0]] |= inputs
    modules = []
    for path, count in chains.items():
        others = {name for other in chains if other != path for name in read[other]}
        modules.append(
            SplitModule(
                name=names[path],
                path=path,
                count=count,
                inputs=tuple(name for name in tensors if name in read[path]),
                own_inputs=tuple(name for name in tensors if name in read[path] - others),
            )
        )
    return tuple(modules)


def _idle(
    model: nn.Module, used: frozenset[str], chains: Mapping[str, int], names: Mapping[str, str]
) -> dict[str, str]:
    order = list(chains)
    return {
        name: names[max(order, key=lambda path: (_count_common_words(name, path), order.index(path)))]
        for name, _ in model.named_parameters()
        if name not in used
    }


_NUMBERS = (int, float, np.ndarray)

Owner = tuple[str, int]
"""Name of a module's list, and index of the layer."""
_Owned = tuple[Owner, TracedCall]


def assign_owners(calls: Sequence[TracedCall], counts: Mapping[str, int]) -> list[Owner]:
    """Returns each call's owner.

    A module around layers belongs to the list whose name shares the longest prefix with its own; if several do, to the
    only one that it depends on, and otherwise to the first that it reaches. What comes before the layers runs with the
    first that needs it, and what follows them with the last.
    """
    layer_of = {layer_name(path, index): (path, index) for path, count in counts.items() for index in range(count)}
    own: list[set[Owner]] = [{layer_of[call.path]} if call.path in layer_of else set() for call in calls]
    behind: list[set[Owner]] = []
    ahead: list[set[Owner]] = [set() for _ in calls]
    for call in calls:
        behind.append(set().union(*(behind[value.site] | own[value.site] for value in call.values)))
    for index in reversed(range(len(calls))):
        for value in calls[index].values:
            ahead[value.site] |= own[index] | ahead[index]
    owners: list[Owner] = []
    for index, call in enumerate(calls):
        if call.path in layer_of:
            owners.append(layer_of[call.path])
            continue
        path = _list_of(call.path, list(counts), {p for p, _ in behind[index]}, {p for p, _ in ahead[index]})
        needed = [layer for p, layer in behind[index] if p == path]
        needing = [layer for p, layer in ahead[index] if p == path]
        layer = max(needed) if needed else min(needing, default=0)
        if needed and not needing:
            layer = max(at for earlier in own[:index] for p, at in earlier if p == path)
        owners.append((path, layer))
    return owners


def _list_of(path: str, order: list[str], behind: set[str], ahead: set[str]) -> str:
    common = {name: _count_common_words(path, name) for name in order}
    near = [name for name in order if common[name] == max(common.values())]
    if len(near) == 1 or (len(behind) == 1 and behind <= set(near)):
        return near[0] if len(near) == 1 else behind.pop()
    reached = [name for name in near if name in ahead]
    return reached[0] if reached else max(behind & set(near), key=order.index, default=near[-1])


def order_modules(sites: Sequence[tuple[Owner, TracedCall]], paths: Sequence[str]) -> list[str]:
    """Returns the lists in topological order, otherwise in the order of calls (``paths``).

    The list of the last site is last, if it feeds no other.
    """
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(paths, ()))
    feeding: set[str] = set()
    for (path, layer), call in sites:
        for value in call.values:
            source, at = sites[value.site][0]
            if source != path:
                sorter.add(path, source)
                feeding.add(source)
            elif at > layer:
                raise UnsplittableError(
                    f"{call.path or 'the output'} runs with layer {layer} of {path!r} and needs "
                    f"{sites[value.site][1].path} of layer {at} ({call.line}): where a loop takes elements of several "
                    "lists in turn, as zip() does, make one list whose layers hold and call an element of each; "
                    "otherwise name other lists by modules="
                )
    try:
        sorter.prepare()
    except CycleError as problem:
        circle = " -> ".join(reversed(problem.args[1]))
        raise LayerListError(
            f"modules feed each other in a circle: {circle}; name fewer lists by modules=, so that the rest runs as "
            "one",
            lists=frozenset(problem.args[1]),
        ) from None
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=paths.index)
        order += ready
        sorter.done(*ready)
    last = sites[-1][0][0]
    return order if last in feeding else [*(path for path in order if path != last), last]


def check_values_between(sites: Sequence[_Owned]) -> None:
    """Raises UnsplittableError if a rank cannot make what another one has made between modules.

    Several layers use one draw of random numbers, or the number of rows of a layer's input depends on values.
    """
    users: dict[str, set[Owner]] = {}
    for (path, layer), call in sites:
        for line in sources(call.labels, "random"):
            users.setdefault(line, set()).add((path, layer))
        rows = sources(call.labels, "rows")
        if rows and call.path == layer_name(path, layer):
            raise UnsplittableError(
                f"how many rows layer {layer} of {path!r} reads follows from values of other modules "
                f"({min(rows)}); the rank that receives them has to know it before: choose rows by inputs, or "
                "give those that are not chosen no weight"
            )
    for line, owners in users.items():
        if len(owners) > 1:
            raise UnsplittableError(
                f"random numbers drawn at {line} reach {len(owners)} layers, such as {max(owners)[1]} of "
                f"{max(owners)[0]!r}; ranks would each draw others: draw them in a module, such as "
                "nn.Dropout, or set the rate to 0"
            )


def _count_common_words(path: str, other: str) -> int:
    """Returns the number of words in the common prefix of two names."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


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
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    blank = BlankResults(device) if stand_ins.by_name or is_on_meta else None
    if blank is not None:
        _check_runs_without_data(model, sites)

    with restored_objects(model) as before, forked(device):
        with stand_ins.placed():
            parameters = dict(model.named_parameters()) | stand_ins.by_name
            tensors = copied(dict(sample))
            run = follow(model, tensors, sites=sites, scopes=scopes, parameters=parameters, blank=blank, loss=loss)
        _check_state(model, before, run.is_drawn)
    chains = _chains(lists, run, by_hand=modules is not None)
    return describe(model, sample, run, chains, _names(list(chains), modules))


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


def _chains(lists: Mapping[str, LayerList], run: TracedRun, *, by_hand: bool) -> dict[str, int]:
    """Returns the number of layers of each list, in the order of calls."""
    chains: dict[str, tuple[int, int]] = {}
    for path, layers in lists.items():
        own = {layer_name(path, index) for index in range(len(layers))}
        calls = [(index, call) for index, call in enumerate(run.calls) if call.path in own]
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


_PURE_HOOKS = "transformers.utils.output_capturing"
"""The library whose hooks keep results that a flag of the configuration asks for."""


def _check_runs_without_data(model: nn.Module, sites: Mapping[str, nn.Module]) -> None:
    """Raises UnsplittableError if a buffer between sites is on the meta device, or a hook keeps what a site makes."""
    inside = {id(module) for site in sites.values() for module in site.modules()}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and id(module) not in inside:
                raise meta_buffer(f"{path}.{name}")
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            raise kept_inside(path or "the model", "output_router_logits=True of its configuration")
    for path, site in sites.items():
        for inner in site.modules():
            if inner is not site and any(hook.__module__ != _PURE_HOOKS for hook in inner._forward_hooks.values()):
                raise kept_inside(path, "a forward hook inside of it, which does not run without weights")


def _check_state(model: nn.Module, before: Objects, is_drawn: Callable[[Any], bool]) -> None:
    """Raises UnsplittableError if a run left state that changes the next one.

    Such state is a number, an array, a queue, another tensor in a buffer's place, and a container with numbers that
    were drawn between layers.
    """
    homes = {id(vars(module)): (path, module) for path, module in model.named_modules()}
    buffers = {id(module._buffers): path for path, module in model.named_modules()}
    values = {id(value): (path, name) for path, m in model.named_modules() for name, value in vars(m).items()}
    for container, key, old, new in before.differences():
        path, name = values.get(id(container), (None, ""))
        if id(container) in buffers:
            path, name = buffers[id(container)], f"buffer {key}"
            changed = new is not None and not (new.is_meta or torch.equal(new, old))
        elif id(container) in homes:
            (path, module), name = homes[id(container)], f"attribute {key}"
            old = getattr(type(module), key, None) if old is None else old
            changed = _is_state(new, is_drawn)
            if isinstance(new, _NUMBERS) and isinstance(old, _NUMBERS) and not isinstance(new, bool):
                changed = not np.array_equal(old, new, equal_nan=True)
        else:
            name, changed = f"attribute {name}", isinstance(container, np.ndarray) or _is_state(container, is_drawn)
        if changed and path is not None:
            raise UnsplittableError(
                f"{path or 'the model'} changes its {name} when it is called; chunks call it more often than the plain "
                "loop does, and in another order: let the loop change it"
            )


def _is_state(value: Any, is_drawn: Callable[[Any], bool]) -> bool:
    return isinstance(value, deque) or (isinstance(value, dict | list | set) and is_drawn(value))
