"""Ways to get a stream, or on the host a thread, on a partition: made when it is needed, or lent from a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mosaic.backends.base import Backend
from mosaic.backends.cuda.driver import driver as cuda
from mosaic.errors import BackendUnavailableError

Slots = tuple[int, ...]


class Made(Protocol):
    """A stream or thread that exists."""

    def close(self) -> None:
        """Ends it and what it needed."""


@dataclass(frozen=True, slots=True)
class Maker:
    """One way to make what runs on a partition, from nothing."""

    name: str
    """Which way."""
    make: Callable[[Slots], Made]
    """Makes it; returns when it can be used."""


class _Closing:
    """Anything that ends when it is let go."""

    def __init__(self, *held: Any) -> None:
        self._held = list(held)

    def close(self) -> None:
        while self._held:
            self._held.pop()


def makers(backend: Backend) -> tuple[tuple[Maker | None, str, str], ...]:
    """Returns each way with its name; None and the reason where it cannot be had."""
    if backend.torch_device.type != "cuda":
        name = "lanes"
        return (
            (Maker(name, lambda slots: backend.open_lanes([slots])), name, ""),
            (None, "contexts and driver memory", f"the {backend.name} backend has threads in their place"),
        )
    ordinal = backend.torch_device.index or 0
    pool = Maker("context and stream", lambda slots: cuda.open_pool(ordinal, [[slots]]))
    by_torch = "torch.cuda.green_contexts"
    try:
        made: Maker | None = Maker(by_torch, _torch_maker(backend.device.sms_per_slot, ordinal))
        reason = ""
    except BackendUnavailableError as error:
        made, reason = None, str(error)
    return (pool, pool.name, ""), (made, by_torch, reason)


def _torch_maker(sms_per_slot: int, ordinal: int) -> Callable[[Slots], Made]:
    from torch.cuda import green_contexts

    kind: Any = green_contexts.GreenContext
    create = getattr(kind, "create", kind)
    if not getattr(green_contexts, "SUPPORTED", True) or not hasattr(kind, "Stream"):
        raise BackendUnavailableError(
            "torch's green contexts cannot be had",
            found=f"torch {torch.__version__}",
            needed="torch 2.11 built with CUDA 12.8 or newer",
        )

    def make(slots: Slots) -> Made:
        context = create(num_sms=len(slots) * sms_per_slot, device_id=ordinal)
        return _Closing(context, context.Stream())

    return make


@dataclass(frozen=True, slots=True)
class Lender:
    """Something that hands out what was made before."""

    name: str
    """Which way."""
    once: Callable[[], object]
    """Lends and, where that is needed, gives back."""


@contextmanager
def open_lender(backend: Backend, slots: Slots) -> Iterator[Lender]:
    """Opens a pool, or lanes where there is none, with one partition."""
    if backend.torch_device.type != "cuda":
        with backend.open_lanes([slots]) as lanes:
            yield Lender("look up a lane", lambda: lanes.lane(slots))
        return
    pool = cuda.open_pool(backend.torch_device.index or 0, [[slots]])
    lend, give_back = pool.lend, pool.give_back
    try:
        yield Lender("lend and give back", lambda: give_back(lend(0, 0)))
    finally:
        pool.close()


def free_bytes(backend: Backend) -> int | None:
    """Returns the device's free memory as its driver tells it; None on the host."""
    if backend.torch_device.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(backend.torch_device)[0])


def many_partitions(num_slots: int, most: int) -> Sequence[Slots]:
    """Returns up to ``most`` different partitions, small ones first, each of neighbouring slots."""
    found = [
        tuple(range(start, start + size)) for size in range(1, num_slots + 1) for start in range(num_slots - size + 1)
    ]
    return found[:most]
