"""Activations of layers that wait in the host's memory between forward and backward (PipeWeaver, section 6.3).

Each tensor that autograd saves in a layer is copied to the host as soon as it is saved, and its memory is free once the
layer has ended. Backward fetches a layer's tensors while it runs the layer behind it, so that two layers are whole at a
time; the last layer of a chunk is fetched while another chunk's backward runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.errors import ModuleContractError

MIN_BYTES = 1024
"""Smaller tensors stay: a copy would take longer than they are worth."""


class ThreadCopies:
    """Copies on a thread of its own, for models on CPU cores: nothing becomes free, but all else is as on a GPU."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "mosaic-offload")

    def store(self, tensor: Tensor) -> Future[Tensor]:
        return self._thread.submit(_copy, tensor, torch.device("cpu"))

    def fetch(self, stored: Future[Tensor]) -> Future[Tensor]:
        return self._thread.submit(lambda: _copy(stored.result(), torch.device("cpu")))

    def wait(self, fetched: Future[Tensor]) -> Tensor:
        return fetched.result()


class StreamCopies:
    """Copies on two streams of their own, one for each direction, to and from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def store(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host = _copy(tensor, torch.device("cpu"), pin_memory=True)
        tensor.record_stream(self._out)
        return host, self._out.record_event()

    def fetch(self, stored: tuple[Tensor, torch.cuda.Event]) -> tuple[Tensor, torch.cuda.Event]:
        host, is_stored = stored
        result = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        self._back.wait_stream(torch.cuda.current_stream(self._device))  # which may still use the memory
        self._back.wait_event(is_stored)
        with torch.cuda.stream(self._back):
            result.copy_(host, non_blocking=True)
        result.record_stream(self._back)
        return result, self._back.record_event()

    def wait(self, fetched: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        result, is_there = fetched
        torch.cuda.current_stream(self._device).wait_event(is_there)
        return result


Copies = ThreadCopies | StreamCopies
"""``store`` begins a copy to the host, ``fetch`` one back, and ``wait`` returns the tensor for work from now on."""


def copies_for(device: torch.device) -> Copies:
    return StreamCopies(device) if device.type == "cuda" else ThreadCopies()


class Offload:
    """The layers of one forward of a chunk whose activations are in the host's memory."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._last: _StoredLayer | None = None

    def run(self, layer: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a layer, and stores what its backward needs.

        Raises:
            ModuleContractError: The layer writes into what it has saved.
        """
        own = self._last = _StoredLayer(self._copies, before=self._last)
        with torch.autograd.graph.saved_tensors_hooks(own.pack, _unpack):
            result = layer(*args, **kwargs)
        own.end()
        return result

    def prefetch(self) -> None:
        """Begins to fetch the last layer, whose backward comes first."""
        if self._last is not None:
            self._last.prefetch()


class _StoredTensor:
    """A tensor that a layer's graph has saved; autograd holds it until the tensor's backward has run."""

    __slots__ = ("__weakref__", "fetched", "layer", "stored")

    def __init__(self, layer: _StoredLayer, stored: Any) -> None:
        self.layer, self.stored = layer, stored
        self.fetched: Any = None


class _StoredLayer:
    def __init__(self, copies: Copies, before: _StoredLayer | None) -> None:
        self._copies, self._before = copies, before
        self._tensors: list[weakref.ref[_StoredTensor]] = []
        self._saved: dict[Any, tuple[Tensor, int, _StoredTensor]] = {}
        """While the layer runs, its saved tensors with their versions: one that is saved twice is stored once."""

    def pack(self, tensor: Tensor) -> Tensor | _StoredTensor:
        if not _may_leave(tensor):
            return tensor
        key = tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype, tensor._version
        if key not in self._saved:
            plain = tensor.detach()
            own = _StoredTensor(self, self._copies.store(plain))
            self._tensors.append(weakref.ref(own))
            self._saved[key] = plain, tensor._version, own
        return self._saved[key][2]

    def end(self) -> None:
        saved, self._saved = self._saved.values(), {}
        if any(tensor._version != version for tensor, version, _ in saved):
            raise ModuleContractError(
                "a layer writes into a tensor that its backward needs; give its layers another policy than 'offload'"
            )

    def prefetch(self) -> None:
        """Begins to fetch the tensors whose backward has not run."""
        tensors, self._tensors = self._tensors, []
        for reference in tensors:
            if (own := reference()) is not None:
                own.fetched = self._copies.fetch(own.stored)

    def take(self, own: _StoredTensor) -> Tensor:
        self.prefetch()
        if self._before is not None:
            self._before.prefetch()
        return self._copies.wait(own.fetched)


def _unpack(saved: Tensor | _StoredTensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.layer.take(saved)


def _may_leave(tensor: Tensor) -> bool:
    """Returns False for weights, small tensors, and layouts that a copy would not keep."""
    base = tensor._base if tensor._is_view() else tensor
    return (
        tensor.layout is torch.strided
        and tensor.nbytes >= MIN_BYTES
        and not isinstance(base, nn.Parameter)
        and all(stride or size < 2 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        and type(tensor) is Tensor
    )


@torch.no_grad()
def _copy(tensor: Tensor, device: torch.device, *, pin_memory: bool = False) -> Tensor:
    """Returns a copy with the same strides, since kernels may round otherwise with others."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pin_memory)
    return like.copy_(tensor, non_blocking=pin_memory)
