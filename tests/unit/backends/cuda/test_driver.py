"""The extension ``mosaic._C`` against the fake driver, in child processes."""

from __future__ import annotations

import ctypes

import pytest
from fake_driver.harness import FakeDriver

from mosaic import _C
from mosaic.errors import BackendUnavailableError

# Calls every function that describes devices and slots, in the order of a normal life; those of pools have tests of
# their own.
LIFE = """
from mosaic import _C
def life():
    _C.driver_version(), _C.missing_functions(), _C.device_count()
    device = _C.Device(0)
    with_context = _C.PrimaryContext(device)
    _C.SlotSplit(device)
    with_context.close()
"""

# Before the driver's own error functions are known, a status has only its number.
UNNAMED = {"cuGetProcAddress": "CUresult 999", "cuDriverGetVersion": "CUresult 999"}


@pytest.mark.parametrize("call", ["cuGetProcAddress", "cuDriverGetVersion", "cuInit"])
def test_each_failing_call_raises_a_cuda_error_that_names_call_and_status(fake_driver: FakeDriver, call: str):
    error = fake_driver.run(LIFE + "result = error_of(life)", fail=f"{call}=999")
    assert (error["kind"], error["call"]) == ("CudaError", call)
    assert error["status"] == UNNAMED.get(call, "CUDA_ERROR_UNKNOWN")
    assert call in error["text"]


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, [16, 8, 4]),
        ({"devices": "108:8.0"}, [27, 4, 0]),
        ({"devices": "80:7.0"}, [40, 2, 0]),
        ({"devices": "142:8.9"}, [35, 4, 2]),
        ({"version": 12040}, [16, 8, 4]),  # does not tell its smallest partition; the split finds it
    ],
)
def test_the_size_of_a_slot_is_the_drivers_and_differs_by_device(
    fake_driver: FakeDriver, settings: dict[str, str | int], slots: list[int]
):
    body = """
from mosaic import _C
split = _C.SlotSplit(_C.Device(0))
result = [split.num_slots, split.sms_per_slot, split.remainder_sms]
"""
    assert fake_driver.run(body, **settings) == slots


@pytest.mark.parametrize(
    ("quirk", "words"),
    [
        ("fewer_groups", "made 15 groups where its dry run promised 16"),
        ("uneven_groups", "groups of unequal size (8 and 7 SMs)"),
        ("too_many_sms", "gave out 133 SMs of 132"),
        ("no_groups", "would make 0 groups of 132 SMs"),
    ],
)
def test_a_split_that_breaks_the_drivers_own_rules_is_refused(fake_driver: FakeDriver, quirk: str, words: str):
    error = fake_driver.run(LIFE + "result = error_of(life)", quirk=quirk)
    assert (error["kind"], error["call"], error["status"]) == (
        "CudaError",
        "cuDevSmResourceSplitByCount",
        "CUDA_SUCCESS",
    )
    assert words in error["text"]


def test_a_device_tells_who_it_is(fake_driver: FakeDriver):
    body = """
from mosaic import _C
device = _C.Device(1)
result = [_C.device_count(), device.ordinal, device.name, device.uuid, device.compute_capability,
          device.num_sms, device.total_memory_bytes]
"""
    uuid = "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1"
    expected = [2, 1, "Fake GPU", uuid, [8, 0], 108, 80 * 2**30]
    assert fake_driver.run(body, devices="132:9.0,108:8.0") == expected


def test_an_old_driver_names_the_functions_that_it_lacks(fake_driver: FakeDriver):
    body = """
from mosaic import _C
missing = {f.name: (f.since, f.use) for f in _C.missing_functions()}
errors = [error_of(call) for call in (lambda: _C.SlotSplit(_C.Device(0)), lambda: _C.Device(2))]
result = [_C.driver_version(), missing, _C.Device(0).num_sms, errors]
"""
    version, missing, num_sms, (too_old, out_of_range) = fake_driver.run(body, version=12000)
    assert (version, num_sms) == (12000, 132)
    assert (too_old["found"], too_old["needed"]) == ("a driver of CUDA 12.0", "a driver of CUDA 12.4 or newer")
    assert out_of_range["text"] == "ordinal=2 names no device: this machine has 1; use 0 to 0"
    assert missing == {
        "cuDeviceGetDevResource": [12040, "slots"],
        "cuDevSmResourceSplitByCount": [12040, "slots"],
        "cuDevResourceGenerateDesc": [12040, "streams"],
        "cuGreenCtxCreate": [12040, "streams"],
        "cuGreenCtxDestroy": [12040, "streams"],
        "cuGreenCtxGetDevResource": [12040, "streams"],
        "cuGreenCtxStreamCreate": [12050, "streams"],
    }


def test_without_a_driver_every_entry_says_that_there_is_none():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        for call in (_C.driver_version, _C.missing_functions, _C.device_count, lambda: _C.Device(0)):
            with pytest.raises(BackendUnavailableError, match=r"libcuda\.so\.1.*12\.5"):
                call()
    else:
        pytest.skip("this machine has a driver")


def test_a_driver_without_devices_is_unavailable_rather_than_broken(fake_driver: FakeDriver):
    body = "from mosaic import _C\nresult = error_of(_C.device_count)"
    error = fake_driver.run(body, fail="cuInit=100")
    assert (error["kind"], error["found"]) == ("BackendUnavailableError", "cuInit gave CUDA_ERROR_NO_DEVICE")


def test_every_function_is_had_in_the_form_that_it_was_written_for(fake_driver: FakeDriver):
    """A driver has a form for each version that changed a function, and gives the one that is asked for."""
    body = """
from mosaic import _C
pool = _C.StreamPool(_C.Device(0), [[[0], [1]]])
pool.verify(_C.PROBE_SOURCE.encode())
_C.Device(0).uuid, _C.Device(0).total_memory_bytes
pool.close()
result = [misused(), leaked()]
"""
    assert fake_driver.run(body, version=14000) == [[], {}]


def test_importing_the_extension_does_not_touch_the_driver(fake_driver: FakeDriver):
    body = "import mosaic._C, mosaic.backends.cuda.driver\nresult = count('calls', 'cuGetProcAddress')"
    assert fake_driver.run(body) == 0
