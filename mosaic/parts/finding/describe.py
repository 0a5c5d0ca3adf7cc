"""The result of one run, as plain data for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from mosaic.parts.finding.follow import Followed
from mosaic.parts.finding.layer_lists import layer_name
from mosaic.parts.finding.owners import (
    Owner,
    assign_owners,
    check_random_numbers,
    check_rows,
    count_common_words,
    order_modules,
)
from mosaic.parts.finding.seen_call import SeenCall
from mosaic.parts.split import ModelSplit, Site, SplitModule
from mosaic.parts.ways_seen import kind_of

_Owned = tuple[Owner, SeenCall]


def describe(
    model: nn.Module,
    sample: Mapping[str, Any],
    seen: Followed,
    chains: Mapping[str, int],
    names: Mapping[str, str],
) -> ModelSplit:
    """Returns the split of the model.

    Args:
        model: The user's model.
        sample: Its keyword arguments.
        seen: The followed run.
        chains: Number of layers of each list, by its name in the model, in the order of calls.
        names: Name of each list's parts.

    Raises:
        UnsplittableError: The model cannot be split.
    """
    owners = assign_owners(seen.calls, chains)
    sites = list(zip(owners, seen.calls, strict=True))
    output, output_leaves = _output(seen, owners, order_modules(sites, list(chains))[-1])
    owned = [*sites, output]
    order = order_modules(owned, list(chains))
    check_random_numbers(owned)
    check_rows(owned)
    parameters = _parameters(model, owned)
    needed = frozenset().union(*(call.values for _, call in owned))
    hooked_sites = {value.site for value in needed if value.leaf >= seen.calls[value.site].num_leaves}
    return ModelSplit(
        kind=kind_of(sample),
        modules=_modules({path: chains[path] for path in order}, names, owned, seen, list(sample)),
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
                form=call.form,
                hooked=call.hooked if index in hooked_sites else (),
            )
            for index, (((path, layer), call), used) in enumerate(zip(owned, parameters, strict=True))
        ),
        output_leaves=output_leaves,
        written_inputs=tuple(sorted(seen.written_inputs)),
        idle_parameters=_idle(model, frozenset().union(*parameters), chains, names),
    )


def _output(seen: Followed, owners: list[Owner], last: str) -> tuple[_Owned, tuple[str, ...]]:
    """Returns the output as a call of the last module, and the names of its leaves.

    These are the leaves that the loss reads, and others that exist at that module's end; without a loss all its leaves.
    """
    end = last, max(layer for path, layer in owners if path == last)
    call = seen.loss or SeenCall(path="", call=0, line="")
    names: list[str] = []
    for name, leaf in seen.output.items():
        makers = {owners[value.site] for value in leaf.values}
        by_last = seen.loss is None and any(path == last for path, _ in makers)
        if name in call.outputs or (not leaf.inside and (makers <= {end} or by_last)):
            names.append(name)
            call.read(leaf)
    return (end, call), tuple(names)


def _parameters(model: nn.Module, owned: Sequence[_Owned]) -> list[frozenset[str]]:
    """Returns the first names of the parameters of each call."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_call = []
    for _, call in owned:
        inside = model.get_submodule(call.path).parameters() if call.path else ()
        by_call.append(frozenset(call.parameters) | {names[id(parameter)] for parameter in inside})
    return by_call


def _modules(
    chains: Mapping[str, int],
    names: Mapping[str, str],
    owned: Sequence[_Owned],
    seen: Followed,
    tensors: Sequence[str],
) -> tuple[SplitModule, ...]:
    read: dict[str, set[str]] = {path: set() for path in chains}
    for (path, _), call in owned:
        read[path] |= call.inputs
    for scope, inputs in seen.scoped_inputs.items():
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
        name: names[max(order, key=lambda path: (count_common_words(name, path), order.index(path)))]
        for name, _ in model.named_parameters()
        if name not in used
    }
