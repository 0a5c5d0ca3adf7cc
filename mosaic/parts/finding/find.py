"""The split of a model, from one run of a sample: its lists of layers, the owner of each call, and what crosses."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import forked
from mosaic.find.restore import Objects, restored_objects
from mosaic.find.structure import tensors_in
from mosaic.parts.blank import BlankResults
from mosaic.parts.finding.follow import Dataflow, Label, TracedCall, kept_inside, sources
from mosaic.parts.parted_model import kind_of
from mosaic.parts.split import ModelSplit, Site, SplitModule, copied
from mosaic.parts.weights import StandIns, device_of, meta_buffer

LayerList = nn.ModuleList | nn.Sequential
Owner = tuple[str, int]
"""Name of a module's list, and index of the layer."""
_Owned = tuple[Owner, TracedCall]

_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")
_NUMBERS = (int, float, np.number)
_ZIPPED = (
    "where a loop takes elements of several lists in turn, as zip() does, make one list whose layers hold and call an "
    "element of each; otherwise name other lists by modules="
)
_PURE_HOOKS = "transformers.utils.output_capturing"
"""The library whose hooks keep results that a flag of the configuration asks for."""


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
    lists = find_lists(model, modules)
    sites, scopes = _watched(model, lists)
    device = device_of(model, sample)
    stand_ins = StandIns(model, inside=[layer for layers in lists.values() for layer in layers], device=device)
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    blank = BlankResults(device) if stand_ins.by_name or is_on_meta else None
    if blank is not None:
        _check_runs_without_data(model, sites)
    with restored_objects(model) as before, forked(device):
        with stand_ins.placed():
            tensors, parameters = copied(dict(sample)), dict(model.named_parameters()) | stand_ins.by_name
            flow = Dataflow(parameters, dict(model.named_buffers()), tensors, blank)
            with flow.watching(sites, scopes):
                result = model(**tensors)
                output = flow.output_of(result)
                read_by_loss = None if loss is None else flow.loss_of(loss, result)
        _check_state(model, before)

    counts = _chains(lists, flow.calls, by_hand=modules is not None)
    owned = list(zip(assign_owners(flow.calls, counts), flow.calls, strict=True))
    end, output_leaves = _output(output, read_by_loss, owned, order_modules(owned, list(counts))[-1])
    owned.append(end)
    order = order_modules(owned, list(counts))
    check_values_between(owned)
    names = _names(list(counts), modules)
    inputs = _inputs(order, owned, flow.scoped_inputs)
    used = _parameters(model, owned)
    reached = set().union(*used)
    idle = [name for name, _ in model.named_parameters() if name not in reached]
    return ModelSplit(
        kind=kind_of(sample),
        modules=tuple(
            SplitModule(
                name=names[path],
                path=path,
                count=counts[path],
                inputs=tuple(name for name in sample if name in inputs[path]),
                own_inputs=tuple(name for name in sample if [p for p in order if name in inputs[p]] == [path]),
            )
            for path in order
        ),
        sites=tuple(
            Site(
                path=call.path,
                call=call.call,
                module=names[path],
                layer=layer,
                is_layer=call.path == layer_name(path, layer),
                needs=frozenset(call.values),
                parameters=used[index],
                keeps_shape=call.keeps_shape,
                has_effects=call.has_effects,
                may_select=call.may_select and not call.has_effects,
                form=call.form,
            )
            for index, ((path, layer), call) in enumerate(owned)
        ),
        output_leaves=output_leaves,
        written_inputs=tuple(sorted(flow.written_inputs)),
        idle_parameters={name: names[_nearest(name, order)[-1]] for name in idle},
    )


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
        UnsplittableError: A list chosen by hand does not exist, or is not a list.
    """
    modules = dict(model.named_modules())
    lists = {path: module for path, module in modules.items() if isinstance(module, LayerList) and len(module)}
    for name, path in (chosen or {}).items():
        if path not in lists:
            raise UnsplittableError(
                f"modules[{name!r}]={path!r} is no list of layers of this model; name a ModuleList or a Sequential as "
                "named_modules() does"
            )
    if chosen is not None:
        return {path: lists[path] for path in chosen.values()}
    several = {path: layers for path, layers in lists.items() if len(layers) > 1}
    candidates = {path: layers for path, layers in several.items() if _is_uniform(layers)} or several
    return {p: layers for p, layers in candidates.items() if not any(is_inside(p, o) for o in candidates if o != p)}


def is_inside(path: str, outer: str) -> bool:
    return outer == "" or path.startswith(f"{outer}.")


def _is_uniform(layers: LayerList) -> bool:
    have_weights = all(next(layer.parameters(), None) is not None for layer in layers)
    return have_weights and len({type(layer) for layer in layers}) == 1


def _watched(model: nn.Module, lists: Mapping[str, LayerList]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Returns the modules that may be sites, and those that hold lists."""
    layers = {layer_name(path, index) for path, list_layers in lists.items() for index in range(len(list_layers))}
    sites: dict[str, nn.Module] = {}
    scopes: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        acts = next(module.parameters(), None) is not None or isinstance(module, _DropoutNd)
        if path in layers:
            sites[path] = module
        elif path == "" or any(is_inside(layer, path) for layer in layers):
            scopes[path] = module
        elif acts and not any(is_inside(path, layer) for layer in layers):
            sites[path] = module
    return sites, scopes


def _chains(lists: Mapping[str, LayerList], calls: Sequence[TracedCall], *, by_hand: bool) -> dict[str, int]:
    """Returns the number of layers of each list of layers, in the order of calls.

    A detected list whose elements are not called in order, once each, runs as a part of others, unless it has most of
    the weights.
    """
    chains: dict[str, tuple[int, int]] = {}
    sizes = {path: sum(each.numel() for each in layers.parameters()) for path, layers in lists.items()}
    for path, layers in lists.items():
        index_of = {layer_name(path, index): index for index in range(len(layers))}
        own = [(site, call) for site, call in enumerate(calls) if call.path in index_of]
        if by_hand and not own:
            raise UnsplittableError(
                f"no layer of {path!r} was called with the sample, other than inside of another layer; give a sample "
                "that calls them, or name the outer list alone"
            )
        order = [index_of[call.path] for _, call in own]
        if not by_hand and not _is_chain(own):
            continue
        if order == list(range(len(layers))):
            chains[path] = own[0][0], len(layers)
        elif by_hand or 2 * sizes[path] >= sum(sizes.values()):
            wrong = next((place for place, layer in enumerate(order) if layer != place), len(order) - 1)
            raise UnsplittableError(
                f"the {len(layers)} layers of {path or 'the model'!r} run in the order {', '.join(map(str, order))} "
                f"(see {own[wrong][1].line}); each has to run once with every microbatch, in the order of the list: "
                "give each call a layer of its own, sort the list, take out what does not run, or name other lists by "
                "modules="
            )
    if not chains:
        raise UnsplittableError(
            "no list of layers was found: a ModuleList or Sequential whose elements are called one after the other, "
            "each with what the one before returned; name it by modules={'text': 'model.layers'}"
        )
    return {path: count for path, (_, count) in sorted(chains.items(), key=lambda item: item[1])}


def _is_chain(calls: Sequence[tuple[int, TracedCall]]) -> bool:
    """Returns True if most calls of a list's elements read the result of the previous call."""
    pairs = list(itertools.pairwise(calls))
    linked = sum(any(value.site == before for value in call.values) for (before, _), (_, call) in pairs)
    return len(pairs) > 0 and 2 * linked >= len(pairs)


def _names(paths: list[str], modules: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a name for each list: the first word in which paths differ, or the module that holds it."""
    if modules is not None:
        return {path: name for name, path in modules.items()}
    words = [path.split(".") for path in paths]
    if len(paths) == 1:
        return {paths[0]: words[0][-2] if len(words[0]) > 1 else "model"}
    common = _count_common_words(*paths)
    short = [w[min(common, len(w) - 1)] for w in words]
    return dict(zip(paths, short if len(set(short)) == len(paths) else paths, strict=True))


def _count_common_words(*paths: str) -> int:
    words = zip(*(path.split(".") for path in paths), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda each: len(set(each)) == 1, words))


def _nearest(path: str, lists: Sequence[str]) -> list[str]:
    """Returns the lists that have the longest prefix in common with a name."""
    common = [_count_common_words(path, name) for name in lists]
    return [name for name, count in zip(lists, common, strict=True) if count == max(common)]


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
        if own[index]:
            owners += own[index]
            continue
        near = _nearest(call.path, list(counts))
        before, after = ([path for path in near if path in dict(layers)] for layers in (behind[index], ahead[index]))
        is_bound = before and len(dict(behind[index])) == 1
        path = (before if is_bound else [*after, *reversed(before), *reversed(near)])[0]
        needed = [layer for p, layer in behind[index] if p == path]
        needing = [layer for p, layer in ahead[index] if p == path]
        if needed and not needing:
            needed = [layer for earlier in own[:index] for p, layer in earlier if p == path]
        owners.append((path, max(needed) if needed else min(needing, default=0)))
    return owners


def _output(
    output: Mapping[str, Iterable[Label]], loss: TracedCall | None, owned: Sequence[_Owned], last: str
) -> tuple[_Owned, tuple[str, ...]]:
    """Returns the output as a call of the last module, and the names of its leaves.

    These are the leaves that the loss reads, and others that exist at that module's end; without a loss all its leaves.
    """
    end = last, max(layer for (path, layer), _ in owned if path == last)
    call = loss or TracedCall(path="", call=0, line="")
    names: list[str] = []
    for name, labels in output.items():
        makers = {owned[value.site][0] for value in sources(labels, "value")}
        by_last = loss is None and any(path == last for path, _ in makers)
        exists = not sources(labels, "inside") and (makers <= {end} or by_last)
        if exists or name in sources(call.labels, "output"):
            names.append(name)
            call.labels |= set(labels)
    return (end, call), tuple(names)


def order_modules(sites: Sequence[_Owned], paths: Sequence[str]) -> list[str]:
    """Returns the lists in topological order, otherwise in the order of calls (``paths``).

    The list of the last site is last, if it feeds no other.
    """
    sources_of: dict[str, set[str]] = {path: set() for path in paths}
    for (path, layer), call in sites:
        for value in call.values:
            (source, at), maker = sites[value.site]
            if source != path:
                sources_of[path].add(source)
            elif at > layer:
                raise UnsplittableError(
                    f"{call.path or 'the output'} runs with layer {layer} of {path!r} and needs {maker.path} of layer "
                    f"{at} ({call.line}): {_ZIPPED}"
                )
    order: list[str] = []
    while rest := [path for path in paths if path not in order]:
        ready = [path for path in rest if sources_of[path] <= {*order}]
        if not ready:
            raise UnsplittableError(f"modules feed each other in a circle: {', '.join(rest)}; {_ZIPPED}")
        order.append(ready[0])
    last = sites[-1][0][0]
    if not any(last in needed for needed in sources_of.values()):
        order.append(order.pop(order.index(last)))
    return order


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


def _inputs(
    order: Sequence[str], owned: Sequence[_Owned], scoped_inputs: Mapping[str, set[str]]
) -> dict[str, set[str]]:
    """Returns for each list the tensors of the sample that it reads, be it between the calls of the module around."""
    inputs: dict[str, set[str]] = {path: set() for path in order}
    for (path, _), call in owned:
        inputs[path] |= sources(call.labels, "input")
    for scope, names in scoped_inputs.items():
        inside = [path for path in order if is_inside(path, scope)]
        if len(inside) == 1:
            inputs[inside[0]] |= names
    return inputs


def _parameters(model: nn.Module, owned: Sequence[_Owned]) -> list[frozenset[str]]:
    """Returns the first names of the parameters of each call."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_call = []
    for _, call in owned:
        inside = model.get_submodule(call.path).parameters() if call.path else ()
        by_call.append(frozenset(sources(call.labels, "parameter")) | {names[id(parameter)] for parameter in inside})
    return by_call


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


def _check_state(model: nn.Module, before: Objects) -> None:
    """Raises UnsplittableError if a run left state that may change the next one.

    Such state is a number, an array, a queue, another tensor in a buffer's place, and a container with tensors.
    """
    homes: dict[int, tuple[str, nn.Module, str | None]] = {}
    for path, module in model.named_modules():
        homes |= {id(value): (path, module, name) for name, value in vars(module).items() if _holds_state(value)}
        homes |= {id(vars(module)): (path, module, None), id(module._buffers): (path, module, None)}
    for container, key, old, new in before.differences():
        path, module, attribute = homes.get(id(container), ("", model, None))
        if container is module._buffers:
            changed = new is not None and not new.is_meta and (old is None or not torch.equal(new, old))
        elif container is vars(module):
            old = getattr(type(module), key, None) if old is None else old
            are_numbers = isinstance(new, _NUMBERS) and isinstance(old, _NUMBERS) and not isinstance(new, bool)
            changed = are_numbers or _holds_state(new)
        else:
            changed = attribute is not None
        if changed:
            raise UnsplittableError(
                f"{path or 'the model'} changes its {attribute or key} when it is called; chunks call it more often "
                "than the plain loop does, and in another order: let the loop change it"
            )


def _holds_state(value: Any) -> bool:
    if isinstance(value, deque | np.ndarray):
        return True
    return isinstance(value, dict | list | set) and bool(
        tensors_in(list(value.values()) if isinstance(value, dict) else list(value))
    )
