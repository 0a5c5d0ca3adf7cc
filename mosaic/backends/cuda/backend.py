"""The CUDA backend: lanes are green-context streams, which confine kernels to the SMs of their partition.

Launching on a lane's stream, from any thread, runs work on the lane. Autograd runs each operation's backward on the
stream of its forward. Work on other streams uses the whole device.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mosaic.backends.base import Backend, checked_partitions
from mosaic.backends.cuda.driver import CudaDevice, CudaDriver
from mosaic.backends.cuda.environment import find_here
from mosaic.backends.cuda.pool import GreenPool, Slots, StreamLoan, pack_layouts, pool_of
from mosaic.backends.streams.api import StreamApi, start_autograd
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.backends.streams.libraries import LibrarySettings
from mosaic.device import Device
from mosaic.errors import BackendUnavailableError

_LOG = logging.getLogger("mosaic")

SM_TARGETS = Path(__file__).with_name("sm_targets.json")
"""Measured gains of SM targets, written by ``python -m bench.tables``: mean speed-up of matrix products on a part of
the device, by device name."""
SM_TARGET_PAYS = 1.03
"""Minimum speed-up of an SM target that counts as a gain."""


class CudaBackend(Backend):
    """Runs modules on disjoint sets of a GPU's SMs.

    Args:
        ordinal: The number of the device, for the driver and for torch.
        sm_target: Set the SM count of a lane in libraries, which may then choose other kernels and grids.
        api: The runtime of streams and tensors; by default torch's.
        driver: The device's driver; by default the installed one.

    Raises:
        BackendUnavailableError: The device does not exist, its driver is too old, or torch cannot use it.
        CudaError: The driver failed.
    """

    def __init__(
        self,
        ordinal: int = 0,
        *,
        sm_target: bool = False,
        api: StreamApi | None = None,
        driver: CudaDriver | None = None,
    ) -> None:
        self._driver = driver if driver is not None else CudaDriver(ordinal)
        self._info = self._driver.describe()
        if api is None:
            check_torch(self._info)
            api = StreamApi(ordinal)
            start_autograd(api.device)
        self._api: StreamApi = api
        self._libraries = LibrarySettings(api.device) if sm_target else None
        self._sm_target = sm_target
        self._pool: GreenPool | None = None
        self._notes: dict[str, None] = {}
        self._max_streams = 0
        slots = self._driver.describe_slots()
        self._device = Device(
            name=self._info.name,
            kind="cuda",
            num_slots=slots.num_slots,
            sms_per_slot=slots.sms_per_slot,
            remainder_sms=slots.remainder_sms,
            memory_bytes=self._info.total_memory_bytes,
        )

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def device(self) -> Device:
        return self._device

    @property
    def api(self) -> StreamApi:
        return self._api

    @property
    def torch_device(self) -> torch.device:
        return self._api.device

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings that defeat partitions, from the opening of lanes."""
        return tuple(self._notes)

    @property
    def pool(self) -> GreenPool:
        """The stream pool, shared by all backends of this device and kind; created at the first use."""
        if self._pool is None:
            self.api.synchronize()  # torch creates the primary context before the pool retains it
            self._pool = pool_of(self._driver)
        return self._pool

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> StreamLanes:
        """Opens one lane per distinct partition; existing streams are reused.

        The lane of all slots is a plain stream with every SM, including the remainder of the split.

        Raises:
            InvalidPlanError: A partition is empty or has a slot outside the device.
            BackendUnavailableError: The driver lacks a required function.
            CudaError: The driver failed, or the probe found disjoint partitions that share SMs.
        """
        distinct_partitions = checked_partitions(self._device, partitions)
        all_slots = tuple(self._device.slots)
        loan = self.borrow_streams(slots for slots in distinct_partitions if slots != all_slots)
        streams: dict[Slots, tuple[Any, int | None]] = {}
        plain_streams: list[Any] = []

        def give_back() -> None:
            loan.give_back()
            for stream in plain_streams:
                self._api.give_back(stream)

        try:
            for slots, handle in loan.streams.items():
                streams[slots] = (self.api.external_stream(handle), loan.records[slots].granted_sms)
            if all_slots in distinct_partitions:  # includes the remainder of the split
                plain_streams.append(self.api.new_stream())
                streams[all_slots] = (plain_streams[0], self._info.num_sms)
            records = loan.records.values()
            lanes = StreamLanes(self.api, streams, give_back, libraries=self._libraries, partitions=records)
        except BaseException:
            give_back()
            raise
        self._look_around(num_streams=len(streams))
        return lanes

    def borrow_streams(self, partitions: Iterable[tuple[int, ...]]) -> StreamLoan:
        """Borrows only the streams of lanes, without events; raises as ``open_lanes``."""
        distinct_partitions = checked_partitions(self._device, partitions)
        return self.pool.borrow(pack_layouts(distinct_partitions), image=self._image)

    def open_plain_lanes(
        self, partitions: Iterable[tuple[int, ...]], priorities: Sequence[int] | None = None
    ) -> StreamLanes:
        """Opens plain streams of the whole device under the names of partitions, for comparisons.

        Their ``num_sms`` is None. A lower number in ``priorities`` (default 0) has precedence.
        """
        distinct_partitions = checked_partitions(self._device, partitions)
        priorities = (0,) * len(distinct_partitions) if priorities is None else priorities
        api = self.api
        streams: dict[tuple[int, ...], tuple[Any, int | None]] = {}

        def give_back() -> None:
            for stream, _ in streams.values():
                api.give_back(stream)

        try:
            for slots, priority in zip(distinct_partitions, priorities, strict=True):
                streams[slots] = (api.new_stream(priority), None)
            return StreamLanes(api, streams, give_back)
        except BaseException:
            give_back()
            raise

    @property
    def sm_settings(self) -> str:
        return "SM targets" * self._sm_target

    def with_sm_target(self) -> CudaBackend:
        if self._sm_target:
            return self
        return CudaBackend(self._info.ordinal, sm_target=True, api=self._api, driver=self._driver)

    def sm_target_pays(self) -> bool:
        """Looks up the results of ``python -m bench.gpu`` in the package."""
        speedup: float = json.loads(SM_TARGETS.read_text(encoding="utf-8")).get(self._info.name, 0.0)
        return speedup >= SM_TARGET_PAYS

    def read_units(self) -> tuple[int, ...]:
        """Returns the SMs of the current stream, by the probe."""
        return self._driver.probe_stream(int(self.api.current_stream().cuda_stream))

    def _image(self) -> bytes | None:
        try:
            return self._driver.probe_image()
        except BackendUnavailableError as problem:
            self._note(f"partitions were not probed, so their SM ids are unknown: {problem}")
            return None

    def _look_around(self, *, num_streams: int) -> None:
        if num_streams <= self._max_streams:  # NVML is slow, and its answers rarely change
            return
        self._max_streams = num_streams
        for finding in find_here(self._info.uuid, num_streams=num_streams):
            self._note(finding.sentence)

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes[sentence] = None
            _LOG.warning("%s", sentence)


def check_torch(device: CudaDevice) -> None:
    """Raises BackendUnavailableError unless torch has CUDA and numbers this device like the driver."""
    if not torch.cuda.is_available():
        built = "without CUDA" if torch.version.cuda is None else f"with CUDA {torch.version.cuda}"
        raise BackendUnavailableError(
            "torch cannot use the GPU",
            found=f"torch {torch.__version__}, built {built}",
            needed="a build of torch with CUDA that this driver serves (pytorch.org/get-started)",
        )
    count = torch.cuda.device_count()
    if device.ordinal >= count:
        raise BackendUnavailableError(
            f"torch does not see device {device.ordinal}, {device.name} by the driver; "
            "set CUDA_VISIBLE_DEVICES before the process starts",
            found=f"{count} devices in torch",
            needed=f"more than {device.ordinal}",
        )
    uuid = getattr(torch.cuda.get_device_properties(device.ordinal), "uuid", None)
    if uuid is not None and str(uuid).removeprefix("GPU-") != device.uuid.removeprefix("GPU-"):
        raise BackendUnavailableError(
            f"device {device.ordinal} differs between torch and the driver; "
            "set CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER before the process starts",
            found=f"GPU-{str(uuid).removeprefix('GPU-')} in torch",
            needed=device.uuid,
        )
