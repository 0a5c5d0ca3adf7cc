"""The table of backends: what is missing is named, and a new backend is one file and one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import test_backend_contract as contract

from mosaic.backends import table
from mosaic.backends.base import Backend, Lane, Lanes, Ticket, checked_partitions
from mosaic.backends.cuda import driver as cuda
from mosaic.backends.table import BACKENDS, BackendKind, default_backend, open_backend
from mosaic.device import Device
from mosaic.errors import BackendUnavailableError, CudaError, MosaicError


def installed(*missing: tuple[str, str]) -> cuda.DriverDescription:
    functions = tuple(cuda.MissingFunction(name="cuSomething", since=since, use=use) for use, since in missing)
    return cuda.DriverDescription(version="12.4", missing=functions)


def no_answer() -> Any:
    raise CudaError("no device", call="cuInit", status="CUDA_ERROR_NO_DEVICE")


@pytest.mark.parametrize(
    ("found", "devices", "ordinal", "message"),
    [
        (installed(("streams", "12.5")), lambda: (), 0, r"too old .*found: CUDA 12.4, without cu.*needed: CUDA 12.5"),
        (installed(), no_answer, 0, "does not answer .*found: no device"),
        (installed(), lambda: (), 0, "no GPU number 0.*found: 0 GPUs"),
        (installed(("placement", "13.1")), lambda: (SimpleNamespace(),), 1, "no GPU number 1.*found: 1 GPUs"),
    ],
)
def test_what_a_gpu_lacks_is_named(
    found: Any, devices: Any, ordinal: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cuda, "describe_driver", lambda: found)
    monkeypatch.setattr(cuda, "describe_devices", devices)
    with pytest.raises(BackendUnavailableError, match=message):
        open_backend("cuda", ordinal)


def test_the_host_is_one_device_with_one_kind_of_slot():
    backend = default_backend(torch.device("cpu"))
    assert (backend.name, backend.api, backend.alternatives(), backend.other_processes()) == ("host", None, {}, set())
    with pytest.raises(ValueError, match="has one, 0"):
        open_backend("host", 1)


def test_what_the_table_does_not_have_is_an_error_that_names_what_it_has():
    with pytest.raises(ValueError, match="unknown backend 'tpu'; choose one of: cuda, host"):
        open_backend("tpu")
    with pytest.raises(BackendUnavailableError, match="found: device meta; needed: cuda, cpu"):
        default_backend(torch.device("meta"))


# A new backend: this much is its file.


class NullTicket:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.done, self.interval_ns, self._result, self._error = True, (0, 0), None, None
        try:
            self._result = work()
        except BaseException as error:
            self._error = error

    def wait(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


@dataclass(frozen=True)
class NullMark:
    def ms_until(self, later: NullMark) -> float:
        return 0.0


class NullLane(Lane):
    slots: tuple[int, ...] = ()

    def __init__(self, lanes: list[NullLane], slots: tuple[int, ...]) -> None:
        self.slots, self._lanes = slots, lanes

    def submit(self, work: Callable[[], Any], *, after: Sequence[Ticket[object]] = ()) -> Ticket[Any]:
        if self not in self._lanes:
            raise MosaicError("this lane is closed")
        return NullTicket(work)

    def mark(self) -> NullMark:
        return NullMark()


class NullLanes(Lanes):
    """Runs work at once, on the thread that submits it."""

    launches_inline = True

    def __init__(self, partitions: Iterable[tuple[int, ...]]) -> None:
        self._lanes: list[NullLane] = []
        self._lanes += [NullLane(self._lanes, slots) for slots in partitions]

    def lane(self, slots: tuple[int, ...]) -> NullLane:
        return {lane.slots: lane for lane in self._lanes}[slots]

    def drain(self) -> None:
        pass

    def close(self) -> None:
        self._lanes.clear()


class NullBackend(Backend):
    name = "null"
    device = Device(name="nothing", kind="host", num_slots=4)
    torch_device = torch.device("cpu")

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> NullLanes:
        return NullLanes(checked_partitions(self.device, partitions))


LINE = {"null": BackendKind(make=lambda ordinal: NullBackend(), torch_type="cpu")}


@pytest.fixture
def null(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(table, "BACKENDS", {**BACKENDS, **LINE})
    assert default_backend(torch.device("cpu")).name == "host"  # the first of its type
    return open_backend("null")


@pytest.mark.parametrize(
    "promise",
    [
        contract.test_a_backend_names_itself_and_its_device,
        contract.test_a_lane_gives_the_result_of_its_work,
        contract.test_a_lane_keeps_the_order_of_its_work,
        contract.test_failed_work_does_not_keep_what_waits_for_it_from_starting,
        contract.test_draining_waits_for_everything_and_raises_nothing,
        contract.test_closing_finishes_what_was_submitted_and_refuses_more,
        contract.test_work_can_submit_to_other_lanes,
        contract.test_a_mark_tells_the_time_between_two_points_of_a_lane,
        contract.test_the_same_partitions_can_be_opened_by_two_at_once,
        contract.test_a_partition_is_opened_once_and_only_if_it_was_asked_for,
        contract.test_results_are_let_go_with_their_ticket,
        contract.test_the_protocols_are_met,
        contract.test_what_a_backend_cannot_do_it_says,
    ],
)
def test_a_backend_of_one_file_and_one_line_keeps_the_basic_promises(null: Backend, promise: Callable[[Backend], None]):
    promise(null)


def test_a_backend_of_one_line_refuses_partitions_that_its_device_does_not_have(null: Backend):
    contract.test_a_partition_that_the_device_does_not_have_is_refused(null, (10_000,))
