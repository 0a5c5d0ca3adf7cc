"""Ways to run two pieces of work at the same time: each opens two lanes, or says why it cannot.

All variants hold the same promise, two lanes whose work is the same, so that only the way of sharing differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch

from mosaic.backends.base import Backend, Lane, Lanes
from mosaic.backends.streams.api import TorchStreams
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.errors import BackendUnavailableError, CudaError

Split = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Variant:
    """Two lanes of one kind, open."""

    name: str
    """Which kind, and its quotas where it has any."""
    kind: str
    """Key of ``KINDS``."""
    lanes: Lanes
    """What the lanes belong to; to be closed."""
    both: tuple[Lane, Lane]
    """The two lanes; one lane twice for work that runs one after the other."""
    quotas: Split | None = None
    """Slots of each; None where nothing confines them."""
    note: str = ""
    """What to know about it."""

    @property
    def alternates(self) -> bool:
        """Whether both pieces of work share one lane."""
        return self.both[0] is self.both[1]


@runtime_checkable
class OpensPlainLanes(Protocol):
    """A backend that also has streams without green contexts."""

    def open_plain_lanes(self, partitions: Any, priorities: Any = None) -> Lanes:
        """Opens lanes on the whole device, each under the name of a partition."""


def open_variant(kind: str, backend: Backend, split: Split) -> Variant:
    """Opens one variant.

    Args:
        kind: Key of ``KINDS``.
        backend: Where.
        split: Slots of the two lanes, for kinds that have quotas; names for those that have not.

    Raises:
        BackendUnavailableError: It cannot be had here; says why.
    """
    return KINDS[kind](backend, split)


def parts_of(split: Split) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the slots of two neighbouring partitions."""
    return tuple(range(split[0])), tuple(range(split[0], sum(split)))


def _sequential(backend: Backend, split: Split) -> Variant:
    whole = backend.device.slots
    if isinstance(backend, OpensPlainLanes):
        lanes, note = backend.open_plain_lanes([whole]), "one plain stream with every SM"
    else:
        lanes, note = backend.open_lanes([whole]), "one lane with every slot"
    lane = lanes.lane(whole)
    return Variant("one after the other", "sequential", lanes, (lane, lane), None, note)


def _plain(backend: Backend, split: Split) -> Variant:
    return _streams(backend, split, None, "plain streams", "plain", "two streams, every SM for both")


def _prioritised(backend: Backend, split: Split) -> Variant:
    note = "the first module's stream goes first, every SM for both"
    return _streams(backend, split, (-1, 0), "prioritised streams", "prioritised", note)


def _streams(
    backend: Backend, split: Split, priorities: tuple[int, int] | None, name: str, kind: str, note: str
) -> Variant:
    if not isinstance(backend, OpensPlainLanes):
        raise BackendUnavailableError(
            f"{name} cannot be had", found=f"the {backend.name} backend, whose lanes are confined", needed="a GPU"
        )
    parts = parts_of(split)
    lanes = backend.open_plain_lanes(parts, priorities=priorities)
    return Variant(name, kind, lanes, (lanes.lane(parts[0]), lanes.lane(parts[1])), None, note)


def _partitions(backend: Backend, split: Split) -> Variant:
    parts = parts_of(split)
    lanes = backend.open_lanes(parts)
    name = f"partitions {split[0]}+{split[1]}"
    return Variant(name, "partitions", lanes, (lanes.lane(parts[0]), lanes.lane(parts[1])), split)


def _torch_contexts(backend: Backend, split: Split) -> Variant:
    """``torch.cuda.green_contexts``: disjoint where torch can split (2.15), overlapping otherwise."""
    if backend.torch_device.type != "cuda":
        raise BackendUnavailableError(
            "torch.cuda.green_contexts cannot be had", found=f"the {backend.name} backend", needed="a GPU"
        )
    ordinal = backend.torch_device.index or 0
    sms = tuple(quota * backend.device.sms_per_slot for quota in split)
    made = _torch_streams(sms, ordinal)
    parts = parts_of(split)
    streams = {part: (stream, count) for part, stream, count in zip(parts, made.streams, sms, strict=True)}
    lanes = StreamLanes(TorchStreams(ordinal), streams, lambda: None)
    name = f"torch contexts {split[0]}+{split[1]}"
    return Variant(name, "torch_contexts", lanes, (lanes.lane(parts[0]), lanes.lane(parts[1])), split, made.note)


@dataclass(frozen=True, slots=True)
class _TorchStreams:
    contexts: tuple[Any, ...]
    streams: tuple[Any, ...]
    note: str


@cache  # torch's allocator may ask for a stream long after its last work, so contexts live as long as the process
def _torch_streams(sms: tuple[int, ...], ordinal: int) -> _TorchStreams:
    from torch.cuda import green_contexts

    if not getattr(green_contexts, "SUPPORTED", True):
        raise BackendUnavailableError(
            "this torch has no green contexts", found=f"torch {torch.__version__}", needed="CUDA 12.8 or newer"
        )
    contexts, note = _split_by_torch(green_contexts, sms, ordinal)
    if not all(hasattr(context, "Stream") for context in contexts):
        raise BackendUnavailableError(
            "torch's green contexts have no streams", found=f"torch {torch.__version__}", needed="torch 2.11"
        )
    return _TorchStreams(tuple(contexts), tuple(context.Stream() for context in contexts), note)


def _split_by_torch(torch_contexts: Any, sms: tuple[int, ...], ordinal: int) -> tuple[list[Any], str]:
    """Makes a context of each size; the second value says whether they are disjoint."""
    make = torch_contexts.GreenContext
    reason = f"torch {torch.__version__} cannot split"
    if hasattr(torch_contexts, "SMPartition"):
        try:
            parts, _ = torch_contexts.SMPartition.from_device(ordinal).split(num_sms=list(sms))
            return [make(sm_partition=part) for part in parts], "disjoint, by torch's SMPartition.split"
        except RuntimeError as error:
            reason = f"SMPartition.split failed ({error})"
    try:
        contexts = [getattr(make, "create", make)(num_sms=count, device_id=ordinal) for count in sms]
    except RuntimeError as error:
        raise BackendUnavailableError(
            "torch could not make two green contexts", found=str(error), needed="torch with CUDA 12.8 or newer"
        ) from error
    return contexts, f"{reason}: two contexts made apart, whose SMs OVERLAP, both from the lowest SM on"


KINDS: Mapping[str, Callable[[Backend, Split], Variant]] = MappingProxyType(
    {
        "sequential": _sequential,
        "plain": _plain,
        "prioritised": _prioritised,
        "partitions": _partitions,
        "torch_contexts": _torch_contexts,
    }
)
"""Opens two lanes, by kind."""

UNAVAILABLE = (BackendUnavailableError, CudaError)
"""What a variant that cannot be had raises."""
