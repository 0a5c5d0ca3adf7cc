"""The CUDA backend: lanes are green-context streams, so each module's kernels stay on the SMs of its partition.

Work goes to a lane by launching on its stream, from any thread; autograd runs each operation's backward on the stream
of its forward, so backward stays there, too. What is launched on any other stream uses the whole device.
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
"""Measured gains of SM targets, which ``python -m bench.tables`` writes from kept results: by device's name the mean
speed-up of matrix products on a part of the device when libraries know how many SMs the part has."""
SM_TARGET_PAYS = 1.03
"""Speed-up from which on an SM target counts as a gain."""


class CudaBackend(Backend):
    """Runs modules on disjoint sets of a GPU's SMs.

    Args:
        ordinal: The driver's number of the device, which is torch's, too.
        sm_target: Give libraries the SM count of a lane, by which they may choose other kernels and grids.
        api: The runtime that streams and tensors belong to; torch's by default.
        driver: The device's driver; the installed one by default.

    Raises:
        BackendUnavailableError: There is no such device, its driver is too old, or torch cannot use it.
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
        """Conditions that defeat partitions, as far as they were seen when lanes were opened."""
        return tuple(self._notes)

    @property
    def pool(self) -> GreenPool:
        """The streams, which all backends of this device and kind share; made at the first use."""
        if self._pool is None:
            self.api.synchronize()  # torch makes the primary context, before the pool retains it
            self._pool = pool_of(self._driver)
        return self._pool

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> StreamLanes:
        """Opens one lane for each distinct partition; streams that exist already are lent again.

        The lane of all slots is a plain stream with every SM, also those that the split leaves over.

        Raises:
            InvalidPlanError: A partition is empty or names a slot that the device does not have.
            BackendUnavailableError: The driver lacks a function that this needs.
            CudaError: The driver failed, or partitions were seen to share SMs that must not.
        """
        wanted = checked_partitions(self._device, partitions)
        whole = tuple(self._device.slots)
        loan = self.borrow_streams(slots for slots in wanted if slots != whole)
        streams: dict[Slots, tuple[Any, int | None]] = {}
        lent: list[Any] = []

        def give_back() -> None:
            loan.give_back()
            for stream in lent:
                self._api.give_back(stream)

        try:
            for slots, handle in loan.streams.items():
                streams[slots] = (self.api.external_stream(handle), loan.records[slots].granted_sms)
            if whole in wanted:  # the split leaves SMs over, which a module that is alone can have
                lent.append(self.api.new_stream())
                streams[whole] = (lent[0], self._info.num_sms)
            records = loan.records.values()
            lanes = StreamLanes(self.api, streams, give_back, libraries=self._libraries, partitions=records)
        except BaseException:
            give_back()
            raise
        self._look_around(num_streams=len(streams))
        return lanes

    def borrow_streams(self, partitions: Iterable[tuple[int, ...]]) -> StreamLoan:
        """Lends the streams of lanes alone, for which no event is recorded; raises as ``open_lanes``."""
        wanted = checked_partitions(self._device, partitions)
        return self.pool.borrow(pack_layouts(wanted), image=self._image)

    def open_plain_lanes(
        self, partitions: Iterable[tuple[int, ...]], priorities: Sequence[int] | None = None
    ) -> StreamLanes:
        """Opens plain streams on the whole device under the names of partitions, for comparisons.

        ``num_sms`` of each is None. Of ``priorities``, 0 by default, the lower goes first.
        """
        wanted = checked_partitions(self._device, partitions)
        priorities = (0,) * len(wanted) if priorities is None else priorities
        api = self.api
        streams: dict[tuple[int, ...], tuple[Any, int | None]] = {}

        def give_back() -> None:
            for stream, _ in streams.values():
                api.give_back(stream)

        try:
            for slots, priority in zip(wanted, priorities, strict=True):
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
        """Looks in the measurements of ``python -m bench.gpu`` that Mosaic is installed with."""
        speedup: float = json.loads(SM_TARGETS.read_text(encoding="utf-8")).get(self._info.name, 0.0)
        return speedup >= SM_TARGET_PAYS

    def read_units(self) -> tuple[int, ...]:
        """Returns the SMs that the probe sees the current stream use."""
        return self._driver.probe_stream(int(self.api.current_stream().cuda_stream))

    def _image(self) -> bytes | None:
        try:
            return self._driver.probe_image()
        except BackendUnavailableError as problem:
            self._note(f"partitions were not probed, so their SM ids are unknown: {problem}")
            return None

    def _look_around(self, *, num_streams: int) -> None:
        if num_streams <= self._max_streams:  # NVML takes a while to answer, and what it says changes little
            return
        self._max_streams = num_streams
        for finding in find_here(self._info.uuid, num_streams=num_streams):
            self._note(finding.sentence)

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes[sentence] = None
            _LOG.warning("%s", sentence)


def check_torch(device: CudaDevice) -> None:
    """Raises BackendUnavailableError unless torch has CUDA and its device of this number is the driver's."""
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
            f"torch does not see device {device.ordinal}, which the driver offers as {device.name}; "
            "set CUDA_VISIBLE_DEVICES before the process starts, not inside of it",
            found=f"{count} devices in torch",
            needed=f"more than {device.ordinal}",
        )
    uuid = getattr(torch.cuda.get_device_properties(device.ordinal), "uuid", None)
    if uuid is not None and str(uuid).removeprefix("GPU-") != device.uuid.removeprefix("GPU-"):
        raise BackendUnavailableError(
            f"device {device.ordinal} of torch is another one than the driver's; "
            "set CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER before the process starts, not inside of it",
            found=f"GPU-{str(uuid).removeprefix('GPU-')} in torch",
            needed=device.uuid,
        )
