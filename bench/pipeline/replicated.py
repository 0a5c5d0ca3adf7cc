"""Encoders on every rank, each for itself, as Llama 3's authors trained theirs (Cornstarch, section 2.2)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mosaic.graph import Part
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.partition.ranges import balanced_ends
from mosaic.pipelining.partition.request import Request, backbone_of, layer_times
from mosaic.pipelining.workload.layers import Layer, LayeredModule, PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch

REPLICATED_RANKS = 6
"""Of the backbone (Cornstarch, appendix A)."""


@dataclass(frozen=True, kw_only=True)
class _WithEncoders:
    """A backbone some of whose layers are preceded by the forwards of all encoders."""

    backbone: LayeredModule
    encoders: tuple[LayeredModule, ...]
    layers_after: frozenset[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backbone, name)

    def layers(self, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        again_ms = sum(
            layer.forward_ms
            for encoder in self.encoders
            if (count := encoder.units(microbatch))
            for layer in encoder.layers(microbatch, count)
        )
        return tuple(
            dataclasses.replace(layer, forward_ms=layer.forward_ms + again_ms) if at in self.layers_after else layer
            for at, layer in enumerate(self.backbone.layers(microbatch, units))
        )


def replicated(request: Request, model: PipelineModel) -> tuple[PipelineModel, Partition]:
    """Returns a model and its partition: the backbone cut by its own times, all encoders before each of its chunks.

    The first rank's encoders send gradients back where something trains; the others' are forwards alone, since what
    they compute is the same.
    """
    times = layer_times(request)
    name = backbone_of(model)
    ends = balanced_ends(times[name], request.num_ranks)
    first = (0, *ends[:-1])
    total = len(times[name])
    parts = [Part(module=name, first=a, count=b - a, total=total) for a, b in zip(first, ends, strict=True)]
    encoders = tuple(one for one in model.modules if one.name != name)
    before = tuple(Part(module=one.name, first=0, count=len(one.trains), total=len(one.trains)) for one in encoders)
    chunks = [Chunk(parts=(*before, parts[0]), rank=0)]
    chunks += (Chunk(parts=(part,), rank=rank) for rank, part in enumerate(parts[1:], 1))
    modules = tuple(
        _WithEncoders(backbone=one, encoders=encoders, layers_after=frozenset(first[1:])) if one.name == name else one
        for one in model.modules
    )
    return (
        PipelineModel(modules=modules, feeds=model.feeds),  # type: ignore[arg-type]  # by __getattr__
        Partition(num_ranks=request.num_ranks, chunks=tuple(chunks)),
    )
