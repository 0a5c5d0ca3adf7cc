"""The ladder's verdicts: what each rung concludes from readings, good and bad ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools
from fake_streams.driver import FakePool
from fake_streams.events import FakeEvent, FakeStream

from bench import tables
from bench.gpu.bench import Bench
from bench.gpu.ladder import RUNGS
from bench.gpu.ladder.device import judge_device, judge_products, speedups_of
from bench.gpu.ladder.loops import judge_dropout, judge_towers
from bench.gpu.ladder.operators import judge_conv, judge_equal, judge_triton
from bench.gpu.ladder.streams import events, judge_capture, judge_events, judge_partitions, partitions
from bench.gpu.run import cudnn_runs
from bench.record import Figure, Study
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget

H200 = {
    "name": "NVIDIA H200", "num_slots": 16, "sms_per_slot": 8, "remainder_sms": 4, "num_sms": 132, "lacking": "",
    "driver": "CUDA 13.0", "torch": "2.11.0 (CUDA 13.0, cuDNN 91900)", "clocks": "SM clock 1980 of 1980 MHz",
}  # fmt: skip


def ids(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last))


EVENTS = {"default before left": True, "left before default": True, "ms default to left": 3.1}
CAPTURED = {"left value": 4.0, "right value": 8.0, "left ids": ((0, 1), (0, 1)), "right ids": ((2,), (2, 3))}
TOWERS = {
    "loss difference": 1e-6, "weight difference": 2e-6, "overlap": 0.9, "plain step ms": 4.0, "colocated step ms": 3.0
}  # fmt: skip
DRAWN = {
    "replays": 80, "replays with other numbers": 0, "replays that repeat the one before": 0,
    "replays equal on both lanes": 0, "share kept": 0.5,
}  # fmt: skip
NO_CONV = {"patches": "RuntimeError: CUDNN_STATUS_EXECUTION_FAILED", "3x3": 0.0}
WRONG = {"mm": 0.3, "attention": "RuntimeError: no kernel", "addmm": 0.0, "norm": float("nan")}


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        (
            judge_device(H200),
            "NVIDIA H200: 16 slots of 8 SMs and 4 left over; driver CUDA 13.0; "
            "torch 2.11.0 (CUDA 13.0, cuDNN 91900); SM clock 1980 of 1980 MHz",
        ),
        (judge_events(EVENTS), "events order and time green streams and the default stream, every way"),
        (
            judge_partitions({"8+8": [(64, ids(0, 64)), (64, ids(64, 128))]}),
            "disjoint, and as many SMs as granted: 8+8",
        ),
        (judge_equal({"mm": 0.0, "embedding": 0.0}), "equal bit for bit: mm, embedding"),
        (judge_conv("cold", {"patches": 0.0, "3x3": 0.0}), "equal bit for bit: patches, 3x3"),
        (judge_capture(CAPTURED), "a graph spans two lanes, and each half stays on its SMs"),
        (
            judge_towers(TOWERS),
            "equal within 2e-06; lanes overlap during 90% of their time; a step takes 4.00 ms plain, 3.00 colocated",
        ),
        (judge_dropout(DRAWN, "2.13.0"), "80 replays drew the same numbers at once as in turn (torch 2.13.0)"),
    ],
)
def test_what_is_good_is_said_in_a_sentence(said: str, whole: str):
    assert said == whole


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            judge_device({**H200, "num_sms": 114, "lacking": "cuDevSmResourceSplit"}),
            ["132 where torch says 114: do not trust quotas here", "the driver lacks cuDevSmResourceSplit"],
        ),
        (
            judge_events({**EVENTS, "left before default": False}),
            ["left before default: what was written is not seen", "only plain streams are left"],
        ),
        (judge_events({**EVENTS, "default before left": "RuntimeError: invalid handle"}), ["invalid handle"]),
        (judge_events({**EVENTS, "ms default to left": -0.5}), ["ms default to left: no time passed"]),
        (
            judge_partitions({"8+8": [(64, ids(0, 66)), (64, ids(64, 128))]}),
            ["SMs [64, 65] are shared, as after a module with dynamic parallelism", "64 granted, 66 seen"],
        ),
        (judge_partitions({"8+8": [(64, ids(0, 67)), (64, ids(64, 128))]}), ["QUOTAS DO NOT HOLD"]),
        (
            judge_partitions({"8+8": [(64, ids(0, 64)), (64, ())]}),
            ["8+8: the ids of 1 partitions were not read"],
        ),
        (judge_partitions({"8+8": "CudaError: no"}), ["8+8: CudaError: no"]),
        (judge_equal({"mm": 0.001}), ["mm within 0.001"]),
        (judge_equal(WRONG), ["mm differs by 0.3", "attention: RuntimeError: no kernel", "norm differs by nan"]),
        *(
            (judge_conv(how, NO_CONV), [switch])
            for how, switch in {"cold": "conv-warm", "warm": "conv-native", "native": "exclude"}.items()
        ),
        (judge_triton({"double": 0.0}), ["can be placed"]),
        (judge_triton({"double": "RuntimeError: invalid handle"}), ["leave compiled branches out"]),
        (judge_capture({**CAPTURED, "right value": 4.0}), ["two replays left wrong values"]),
        (
            judge_capture({**CAPTURED, "right ids": ((2, 70, 71), (2, 3))}),
            ["the right half ran on 2 SMs outside"],
        ),
        (judge_capture({**CAPTURED, "left ids": None, "right ids": None}), ["SM ids were not read"]),
        (
            judge_capture({**CAPTURED, "error": "RuntimeError: capture failed"}),
            ["stages cannot be captured here: RuntimeError"],
        ),
        (judge_towers({**TOWERS, "weight difference": 0.5}), ["WRONG NUMBERS: 0.5"]),
        (judge_towers({**TOWERS, "overlap": 0.1}), ["one waits for the other"]),
        (judge_towers({"error": "CudaError"}), ["cannot be colocated here: CudaError"]),
        (
            judge_dropout({**DRAWN, "replays with other numbers": 3, "share kept": 0.6}, "2.11.0"),
            [
                "of 80: 3 replays with other numbers, 60% kept where half should be",
                "modules with random numbers must not be captured on torch 2.11.0",
            ],
        ),
        (judge_dropout({"error": "RuntimeError"}, "2.11.0"), ["cannot be captured on lanes here: RuntimeError"]),
    ],
)
def test_what_is_bad_is_named_with_what_to_do(said: str, words: list[str]):
    assert [word for word in words if word not in said] == []


def product(quota: int, target: str, ms: float | None) -> Figure:
    labels = {"product": "mm", "quota": str(quota), "target": target}
    return Figure(name="time_ms", source="measured", value=ms, labels=labels, reason="" if ms else "no such setting")


def test_sm_targets_pay_where_products_gain_below_the_whole_device():
    gained = [product(8, "none", 3.0), product(8, "both", 2.0), product(16, "none", 1.0), product(16, "both", 0.5)]
    assert judge_products(speedups_of(gained)) == (
        "SM targets pay, CudaBackend(sm_target=True): 1.50x, mm at 8 slots 1.50x"
    )
    level = [product(8, "none", 3.0), product(8, "both", 2.99), product(16, "none", 1.0)]
    assert judge_products(speedups_of(level)).startswith("leave SM targets off")
    failed = [product(8, "none", 3.0), product(8, "both", None)]
    assert "no such setting" in judge_products(speedups_of(failed), ["no such setting"])


def test_the_probe_is_launched_as_the_driver_wants_it(fake_driver: FakeDriver):
    found = run_pools(
        fake_driver,
        f"import sys; sys.path.insert(0, {str(tables.TOP)!r})\n"
        "import ctypes\n"
        "from cuda.bindings import driver\n"
        "from bench.gpu.ladder.streams import SmProbe, sm_ids\n"
        "def ask(name, *given):\n"
        "    status, *values = getattr(driver, name)(*given)\n"
        "    assert int(status) == 0, (name, status)\n"
        "    return values[0] if values else None\n"
        "pool = pool_of([list(range(10)), list(range(10, 16))])\n"
        "streams = [pool.lend(0, part) for part in (0, 1)]\n"
        "ask('cuCtxPushCurrent', ask('cuDevicePrimaryCtxRetain', ask('cuDeviceGet', 0)))\n"
        "probe = SmProbe(b'... mosaic_smid ...', 132)\n"
        "result = []\n"
        "for stream in streams:\n"
        "    memory, words = ask('cuMemAlloc', 128), (ctypes.c_uint * 32)()\n"
        "    ask('cuMemsetD32Async', memory, 0, 32, stream)\n"
        "    probe.launch(int(memory), 32, stream)\n"
        "    ask('cuMemcpyDtoHAsync', ctypes.addressof(words), memory, 128, stream)\n"
        "    ask('cuStreamSynchronize', stream)\n"
        "    result.append(sm_ids(list(words)))",
    )
    assert found == [list(range(80)), list(range(80, 128))]


def test_every_rung_is_a_function_that_asks_a_question_and_the_list_loads_no_torch():
    for rung in RUNGS.values():
        assert callable(rung.resolve())
        assert rung.asks.endswith("?")
    code = "import sys, bench.gpu.ladder; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tables.TOP, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def study_of(**convolutions: float | None) -> Study:
    figures = tuple(
        Figure(name="patches 16x16", source="measured", value=value, part=f"first/{name.replace('_', '-')}")
        for name, value in convolutions.items()
    )
    return Study(
        study="gpu", command="", created="", commit="", python_version="", torch_version="", machine=None,
        foreign_cpu_share=None, figures=figures,
    )  # fmt: skip


def test_lanes_do_without_cudnn_where_the_ladder_saw_it_fail_and_convolutions_run_without_it():
    assert cudnn_runs(study_of())
    assert cudnn_runs(study_of(conv_warm=0.0, conv_native=0.001))
    assert not cudnn_runs(study_of(conv_warm=None, conv_native=0.0))
    assert not cudnn_runs(study_of(conv_warm=0.3, conv_native=0.0))
    assert cudnn_runs(study_of(conv_warm=None, conv_native=None))


def test_a_driver_that_refuses_events_on_green_streams_gets_its_verdict_and_its_sm_ids(
    monkeypatch: pytest.MonkeyPatch,
):
    green: set[int] = set()
    lend, record = FakePool.lend, FakeEvent.record

    def lend_noted(pool: FakePool, layout: int, partition: int) -> int:
        green.add(stream := lend(pool, layout, partition))
        return stream

    def refuse(event: FakeEvent, stream: FakeStream) -> None:
        if stream.handle in green:
            raise RuntimeError("invalid resource handle")
        record(event, stream)

    monkeypatch.setattr(FakePool, "lend", lend_noted)
    monkeypatch.setattr(FakeEvent, "record", refuse)
    bench = Bench(backend=HostBackend(num_slots=2), budget=Budget(), dry_run=True)
    found = {figure.name: figure.value for figure in events(bench)}
    assert found["default before left"] == 1.0
    assert found["left before default"] is None
    assert "green streams cannot be used with this driver" in bench.verdict
    list(partitions(bench))
    assert bench.verdict.startswith("disjoint, and as many SMs as granted")
