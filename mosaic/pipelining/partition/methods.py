"""The methods of partitioning, one line each. To add one, write a function from a ``Request`` and name it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mosaic.errors import unknown
from mosaic.pipelining.partition import colocated, mixed, parallel
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionMethod:
    """A method to cut a model into chunks on ranks."""

    name: str
    phrase: str
    """Description."""
    cut: Callable[[Request], Partition]
    """Makes the partition; raises ValueError if the model has too few layers."""


_ALL = (
    PartitionMethod(
        name="separated",
        phrase="each module over all ranks, in segments whose longest chunk is as short as it can be",
        cut=mixed.separate_by_time,
    ),
    PartitionMethod(
        name="separated-even",
        phrase="each module over all ranks, in segments of equally many layers (PipeWeaver)",
        cut=mixed.separate_evenly,
    ),
    PartitionMethod(
        name="mixed-parameters", phrase="one chain of all layers, balanced by parameters", cut=mixed.by_parameters
    ),
    PartitionMethod(name="mixed-time", phrase="one chain of all layers, balanced by time", cut=mixed.by_time),
    PartitionMethod(name="mixed-v", phrase="one chain down all ranks and back up, balanced by time", cut=mixed.in_a_v),
    PartitionMethod(
        name="encoders-first",
        phrase="encoders in the first chunk, the backbone's layers evenly",
        cut=mixed.encoders_first,
    ),
    PartitionMethod(
        name="parallel", phrase="each module on ranks of its own (Cornstarch's Algorithm 1)", cut=parallel.on_own_ranks
    ),
    PartitionMethod(
        name="lanes",
        phrase="encoders side by side on shares of the same ranks, the backbone on others",
        cut=parallel.on_lanes,
    ),
    PartitionMethod(
        name="colocated",
        phrase="the backbone over all ranks, all other modules beside it on shares of the same ranks",
        cut=colocated.beside_backbone,
    ),
)

PARTITION_METHODS = {method.name: method for method in _ALL}
"""By name."""


def partition_by(name: str, request: Request) -> Partition:
    """Cuts a model by the method of that name.

    Raises:
        ValueError: The name is unknown (lists all), or the model has too few layers.
    """
    if name not in PARTITION_METHODS:
        raise ValueError(unknown("partition", name, PARTITION_METHODS))
    return PARTITION_METHODS[name].cut(request)
