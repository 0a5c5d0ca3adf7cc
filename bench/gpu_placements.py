"""Three ways to cut a device into two unequal partitions, to be compared; the product has the first and the third."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

from mosaic.backends.base import Backend, Lanes
from mosaic.backends.cuda.driver import driver as cuda
from mosaic.backends.streams.api import TorchStreams
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.errors import BackendUnavailableError, CudaError
from mosaic.microbench.sharing.variants import Split, parts_of

Opened = AbstractContextManager[tuple[Lanes, str]]

_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, required by drivers before 13.5
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


@contextmanager
def _merged(backend: Backend, split: Split) -> Iterator[tuple[Lanes, str]]:
    """Slots of one split, put together."""
    with backend.open_lanes(parts_of(split)) as lanes:
        yield lanes, ""


@contextmanager
def _sized(backend: Backend, split: Split) -> Iterator[tuple[Lanes, str]]:
    """One ``cuDevSmResourceSplit`` with both sizes."""
    _require_gpu(backend, "a sized split")
    sized = cuda.CudaBackend(backend.torch_device.index or 0, placement="split")
    with sized.open_lanes(parts_of(split)) as lanes:
        yield lanes, ""


@contextmanager
def _chained(backend: Backend, split: Split) -> Iterator[tuple[Lanes, str]]:
    """A split, a context on what it left over, and a split of that."""
    _require_gpu(backend, "a chain of splits")
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailableError(
            "a chain of splits cannot be made", found=str(error), needed="cuda-bindings"
        ) from error
    ordinal = backend.torch_device.index or 0
    chain = Chain(driver, ordinal)
    try:
        sms = [quota * backend.device.sms_per_slot for quota in split]
        made = [chain.cut(count) for count in sms]
        api = TorchStreams(ordinal)
        streams = {
            part: (api.external_stream(handle), granted)
            for part, (handle, granted) in zip(parts_of(split), made, strict=True)
        }
        with StreamLanes(api, streams, lambda: None) as lanes:
            yield lanes, f"asked for {sms} SMs, granted {[granted for _, granted in made]}"
    finally:
        chain.close()


class Chain:
    """Partitions cut one after the other from what is left of a device.

    Args:
        driver: ``cuda.bindings.driver``.
        ordinal: The device's number.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        self._driver = driver
        self._kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        self._left = self._call("cuDeviceGetDevResource", self._device, self._kind)
        self._contexts: list[Any] = []
        self._streams: list[Any] = []

    def cut(self, num_sms: int) -> tuple[int, int]:
        """Cuts off a partition; returns a stream on it and the SMs that were granted."""
        groups, _, rest = self._call("cuDevSmResourceSplitByCount", 1, self._left, 0, num_sms)
        context = self._context_on(groups[0])
        stream = self._call("cuGreenCtxStreamCreate", context, _NON_BLOCKING, 0)
        self._streams.append(stream)
        granted = self._call("cuGreenCtxGetDevResource", context, self._kind)
        if rest.sm.smCount:  # a result of a split can only be split again by way of a context
            self._left = self._call("cuGreenCtxGetDevResource", self._context_on(rest), self._kind)
        return int(stream), int(granted.sm.smCount)

    def close(self) -> None:
        """Ends streams, then contexts."""
        while self._streams:
            self._call("cuStreamDestroy", self._streams.pop())
        while self._contexts:
            self._call("cuGreenCtxDestroy", self._contexts.pop())

    def _context_on(self, resource: Any) -> Any:
        description = self._call("cuDevResourceGenerateDesc", [resource], 1)
        context = self._call("cuGreenCtxCreate", description, self._device, _DEFAULT_STREAM)
        self._contexts.append(context)
        return context

    def _call(self, name: str, *given: Any) -> Any:
        status, *found = getattr(self._driver, name)(*given)
        if int(status) != 0:
            raise CudaError(f"{name} failed: {status}", call=name, status=str(status))
        return found[0] if len(found) == 1 else tuple(found)


def _require_gpu(backend: Backend, what: str) -> None:
    if backend.torch_device.type != "cuda":
        raise BackendUnavailableError(f"{what} cannot be made", found=f"the {backend.name} backend", needed="a GPU")


PLACEMENTS: Mapping[str, Callable[[Backend, Split], Opened]] = MappingProxyType(
    {"merged slots": _merged, "chain of splits": _chained, "sized split (13.1)": _sized}
)
"""Opens two lanes, with what to know about them."""
