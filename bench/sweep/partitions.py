"""Ways to cut a model's modules into chunks: apart, in the middle, at each layer, and as one mixed chain."""

from __future__ import annotations

import itertools

from mosaic.graph import Part
from mosaic.parts.split import ModelSplit, SplitModule

Chunks = list[tuple[Part, ...]]


def partitions_of(split: ModelSplit) -> dict[str, Chunks]:
    """Returns partitions by what they are; each chunk may be on a rank of its own."""
    layers = [(module, layer) for module in split.modules for layer in range(module.count)]
    result = {
        "modules apart": [(_part(module, 0, module.count),) for module in split.modules],
        "modules in halves": [
            (_part(module, first, end),)
            for module in split.modules
            for first, end in itertools.pairwise(sorted({0, module.count // 2, module.count}))
        ],
        "each layer apart": [(_part(module, layer, layer + 1),) for module, layer in layers],
    }
    for count in range(2, min(4, len(layers)) + 1):
        ends = [round(len(layers) * number / count) for number in range(count + 1)]
        result[f"a chain of {count}"] = [_mixed(layers[first:end]) for first, end in itertools.pairwise(ends)]
    return result


def _mixed(layers: list[tuple[SplitModule, int]]) -> tuple[Part, ...]:
    groups = itertools.groupby(layers, key=lambda pair: pair[0])
    result = [(module, [layer for _, layer in pairs]) for module, pairs in groups]
    return tuple(_part(module, own[0], own[-1] + 1) for module, own in result)


def _part(module: SplitModule, first: int, end: int) -> Part:
    return Part(module=module.name, first=first, count=end - first, total=module.count)
