"""Ways to run two pieces of work at the same time: each opens two lanes, or raises with a reason.

The work on the two lanes is the same in all variants; only the way of sharing differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from mosaic.backends.base import Backend, Lane, Lanes
from mosaic.backends.streams.api import TorchStreams
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.errors import BackendUnavailableError, CudaError

QuotaPair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Variant:
    """Two lanes of one kind, open."""

    name: str
    """Kind, with its quotas if any."""
    kind: str
    """Key of ``KINDS``."""
    lanes: Lanes
    """Owner of the lanes; close it."""
    both: tuple[Lane, Lane]
    """The two lanes; one lane twice for sequential work."""
    quotas: QuotaPair | None = None
    """Slots of each; None without a limit."""
    note: str = ""
    """Remark about it."""


def open_variant(kind: str, backend: Backend, split: QuotaPair) -> Variant:
    """Opens one variant.

    Args:
        kind: Key of ``KINDS``.
        backend: Backend.
        split: Slots of the two lanes, for kinds with quotas; otherwise unused.

    Raises:
        BackendUnavailableError: It is unavailable here.
    """
    return KINDS[kind](backend, split)


def parts_of(split: QuotaPair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the slots of two neighbouring partitions."""
    return tuple(range(split[0])), tuple(range(split[0], sum(split)))


def _sequential(backend: Backend, split: QuotaPair) -> Variant:
    whole = backend.device.slots
    try:
        lanes, note = backend.open_plain_lanes([whole]), "one plain stream with every SM"
    except BackendUnavailableError:
        lanes, note = backend.open_lanes([whole]), "one lane with every slot"
    lane = lanes.lane(whole)
    return Variant("one after the other", "sequential", lanes, (lane, lane), None, note)


def _plain(backend: Backend, split: QuotaPair) -> Variant:
    parts = parts_of(split)
    lanes = backend.open_plain_lanes(parts)
    return Variant("plain streams", "plain", lanes, _both(lanes, parts), None, "two streams, every SM for both")


def _prioritised(backend: Backend, split: QuotaPair) -> Variant:
    parts = parts_of(split)
    lanes = backend.open_plain_lanes(parts, priorities=(-1, 0))
    note = "the first module's stream goes first, every SM for both"
    return Variant("prioritised streams", "prioritised", lanes, _both(lanes, parts), None, note)


def _both(lanes: Lanes, parts: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Lane, Lane]:
    return lanes.lane(parts[0]), lanes.lane(parts[1])


def _partitions(backend: Backend, split: QuotaPair) -> Variant:
    parts = parts_of(split)
    lanes = backend.open_lanes(parts)
    name = f"partitions {split[0]}+{split[1]}"
    return Variant(name, "partitions", lanes, _both(lanes, parts), split)


def _torch_contexts(backend: Backend, split: QuotaPair) -> Variant:
    """``torch.cuda.green_contexts``: disjoint if torch can split (2.15), else overlapping."""
    if backend.torch_device.type != "cuda":
        raise BackendUnavailableError(
            "torch.cuda.green_contexts cannot be had", found=f"the {backend.name} backend", needed="a GPU"
        )
    ordinal = backend.torch_device.index or 0
    sms = tuple(quota * backend.device.sms_per_slot for quota in split)
    _, torch_streams, note = _torch_streams(sms, ordinal)
    parts = parts_of(split)
    streams = {part: (stream, count) for part, stream, count in zip(parts, torch_streams, sms, strict=True)}
    lanes = StreamLanes(TorchStreams(ordinal), streams, lambda: None)
    name = f"torch contexts {split[0]}+{split[1]}"
    return Variant(name, "torch_contexts", lanes, _both(lanes, parts), split, note)


@cache  # torch's allocator may use a stream long after its last work, so contexts live as long as the process
def _torch_streams(sms: tuple[int, ...], ordinal: int) -> tuple[tuple[Any, ...], tuple[Any, ...], str]:
    """Returns contexts, a stream of each, and a note on their overlap."""
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
    return tuple(contexts), tuple(context.Stream() for context in contexts), note


def _split_by_torch(torch_contexts: Any, sms: tuple[int, ...], ordinal: int) -> tuple[list[Any], str]:
    """Creates a context of each size; the second value describes their overlap."""
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


KINDS: Mapping[str, Callable[[Backend, QuotaPair], Variant]] = MappingProxyType(
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
"""Errors of an unavailable variant."""
