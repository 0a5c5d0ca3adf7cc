"""Owners of calls: the module and layer with which each runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.layer_lists import LayerListError, layer_name
from mosaic.parts.finding.seen_call import SeenCall

Owner = tuple[str, int]
"""Name of a module's list, and index of the layer."""


def assign_owners(calls: Sequence[SeenCall], counts: Mapping[str, int]) -> list[Owner]:
    """Returns each call's owner.

    A module around layers belongs to the list whose name shares the longest prefix with its own; if several do, to the
    only one that it depends on, and otherwise to the first that it reaches.

    Args:
        calls: In order.
        counts: Number of layers of each list, by its name in the model, in the order of calls.
    """
    layer_of = {layer_name(path, index): (path, index) for path, count in counts.items() for index in range(count)}
    reads = _behind(calls, layer_of)
    reaches = _before(calls, layer_of)
    order = list(counts)
    owners: list[Owner] = []
    for index, call in enumerate(calls):
        if call.path in layer_of:
            owners.append(layer_of[call.path])
            continue
        path = _list_of(call.path, order, [p for p, _ in reads[index]], [p for p, _ in reaches[index]])
        behind = [layer for p, layer in reads[index] if p == path]
        ahead = [layer for p, layer in reaches[index] if p == path]
        owners.append((path, max(behind) if behind else min(ahead, default=0)))
        if behind and not ahead:
            owners[-1] = (path, _last_called(calls[:index], layer_of, path, counts))
    return owners


def _list_of(path: str, order: list[str], behind: list[str], ahead: list[str]) -> str:
    common = {name: count_common_words(path, name) for name in order}
    near = [name for name in order if common[name] == max(common.values())]
    if len(near) == 1:
        return near[0]
    if len(set(behind)) == 1 and behind[0] in near:
        return behind[0]
    reached = [name for name in order if name in ahead and name in near]
    if reached:
        return reached[0]
    return max(set(behind) & set(near), key=order.index, default=near[-1])


def _last_called(calls: Sequence[SeenCall], layer_of: Mapping[str, Owner], path: str, counts: Mapping[str, int]) -> int:
    called = [layer_of[call.path][1] for call in calls if call.path in layer_of and layer_of[call.path][0] == path]
    return max(called, default=counts[path] - 1)


def _behind(calls: Sequence[SeenCall], layer_of: Mapping[str, Owner]) -> list[set[Owner]]:
    """Returns the layers that each call depends on."""
    layers: list[set[Owner]] = []
    for call in calls:
        own: set[Owner] = set()
        for value in call.values:
            own |= layers[value.site]
            source = calls[value.site].path
            if source in layer_of:
                own.add(layer_of[source])
        layers.append(own)
    return layers


def _before(calls: Sequence[SeenCall], layer_of: Mapping[str, Owner]) -> list[set[Owner]]:
    """The layers that depend on each call."""
    layers: list[set[Owner]] = [set() for _ in calls]
    for index in range(len(calls) - 1, -1, -1):
        call = calls[index]
        own = {layer_of[call.path]} if call.path in layer_of else set()
        for value in call.values:
            layers[value.site] |= own | layers[index]
    return layers


def order_modules(sites: Sequence[tuple[Owner, SeenCall]], paths: Sequence[str]) -> list[str]:
    """Returns the lists in topological order, otherwise in the order of calls.

    The list of the last site is last, if it feeds no other.

    Args:
        sites: Calls with their owners, in order.
        paths: Names of the lists, in the order of calls.

    Raises:
        UnsplittableError: A module feeds itself through another, or an earlier layer.
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


def check_random_numbers(sites: Sequence[tuple[Owner, SeenCall]]) -> None:
    """Raises UnsplittableError if several layers use one draw between modules, because each rank draws again."""
    users: dict[str, set[Owner]] = {}
    for owner, call in sites:
        for line in call.random:
            users.setdefault(line, set()).add(owner)
    for line, owners in users.items():
        if len(owners) > 1:
            raise UnsplittableError(
                f"random numbers drawn at {line} reach {len(owners)} layers, such as {max(owners)[1]} of "
                f"{max(owners)[0]!r}; ranks would each draw others: draw them in a module, such as "
                "nn.Dropout, or set the rate to 0"
            )


def check_rows(sites: Sequence[tuple[Owner, SeenCall]]) -> None:
    """Raises UnsplittableError if the shape of a layer's input depends on values of others, unknown to the receiver."""
    for (path, layer), call in sites:
        if call.rows and call.path == layer_name(path, layer):
            raise UnsplittableError(
                f"how many rows layer {layer} of {path!r} reads follows from values of other modules "
                f"({min(call.rows)}); the rank that receives them has to know it before: choose rows by inputs, or "
                "give those that are not chosen no weight"
            )


def count_common_words(path: str, other: str) -> int:
    """Returns the number of words in the common prefix of two names."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
