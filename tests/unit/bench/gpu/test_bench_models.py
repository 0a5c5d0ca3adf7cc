"""How ``bench.gpu`` measures a model: what comes first, what a failure costs, and the rule of thumb beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

import pytest
import torch
from fake_streams import FakeGreenDriver, FakeStreams
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bench.gpu.bench import Bench
from bench.gpu.models import measure as gpu_models
from bench.gpu.models import variants as gpu_variants
from bench.gpu.models.measure import EVEN_VARIANTS
from bench.gpu.models.rounds import Rounds
from bench.gpu.models.rule_of_thumb import (
    ModuleTimes,
    lanes_ms,
    lever_of,
    measure_rule,
    plain_ms,
)
from bench.gpu.models.variants import Step, Workload
from bench.record import Figure
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget
from mosaic.profiler import Subject


def rehearsal(seconds: float = float("inf")) -> Bench:
    return Bench(backend=HostBackend(num_slots=2), budget=Budget(seconds), dry_run=True)


def fake_backend() -> CudaBackend:
    return CudaBackend(api=FakeStreams(), driver=FakeGreenDriver(num_slots=4))


def test_every_kind_of_lanes_trains_as_the_plain_loop_does_and_without_a_race(monkeypatch: pytest.MonkeyPatch):
    backend, asked = fake_backend(), []

    def opened(ordinal: int, *, sm_target: bool, cudnn: bool) -> CudaBackend:
        asked.append(sm_target)
        return backend

    monkeypatch.setattr(gpu_variants, "CudaBackend", opened)
    bench = Bench(backend=backend, budget=Budget(), dry_run=True)
    with backend.api.watching():
        figures = gpu_models.measure_model(bench, name="clip", batch=2)
        found = list(takewhile(lambda figure: figure.name != "step_tflop", figures))
    differences = {f.labels["variant"]: f.value for f in found if f.name == "loss_difference"}
    assert list(differences) == list(EVEN_VARIANTS)
    assert max(differences.values()) < 1e-3
    assert asked == [False, False, True]
    (targeted,) = (f for f in found if (f.name, f.labels.get("variant")) == ("step_ms", EVEN_VARIANTS[-1]))
    assert targeted.labels["launching"] in ("eager", "captured")


@pytest.fixture
def work() -> Workload:
    made = Workload.__new__(Workload)
    made.losses = lambda step, count=3: [float(step()) for _ in range(count)]  # type: ignore[method-assign]
    made.step = lambda: torch.tensor(1.0)  # type: ignore[method-assign]
    return made


def variant(step: Step) -> object:
    @contextmanager
    def opened() -> Iterator[tuple[Step, Step]]:
        yield (lambda: torch.tensor(1.0)), step

    return opened


def test_a_variant_that_fails_is_a_reason_and_one_whose_losses_differ_never_wins(work: Workload):
    rounds = Rounds(work, rehearsal(), {"right": 1.0, "wrong": 1.0, "broken": 1.0})
    list(rounds.measure_plain())

    def broken() -> torch.Tensor:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    steps: dict[str, Step] = {"right": lambda: torch.tensor(1.0), "wrong": lambda: torch.tensor(2.0), "broken": broken}
    found = {name: list(rounds.measure(name, variant(step))) for name, step in steps.items()}  # type: ignore[arg-type]
    assert [(f.name, f.value, f.reason) for f in found["broken"]] == [
        ("step_ms", None, "RuntimeError: CUDNN_STATUS_EXECUTION_FAILED")
    ]
    assert [f.value for f in found["wrong"] if f.name == "loss_difference"] == [1.0]
    assert set(rounds.speedup) == {"right"}
    rounds.speedup["slow"] = rounds.speedup["right"] / 2
    assert rounds.won("right", over="slow")
    assert not rounds.won("slow", over="right")
    assert not rounds.won("wrong", over="slow")
    assert not rounds.won("right", over="wrong")


def test_a_variant_whose_losses_stop_to_be_numbers_is_not_timed(work: Workload):
    rounds = Rounds(work, rehearsal(), {"late": 1.0})
    list(rounds.measure_plain())
    losses = iter([1.0, 1.0, 1.0, float("nan")])  # a warm step, then those that are compared
    (only,) = rounds.measure("late", variant(lambda: torch.tensor(next(losses))))  # type: ignore[arg-type]
    assert "its losses are [1.0, 1.0, nan]" in only.reason
    assert rounds.speedup == {}


def times(c: float, g: float, s: float) -> ModuleTimes:
    return ModuleTimes(name="m", launch_ms=c, device_ms=g, slowdown=s)


some = st.floats(0.1, 100)


@given(some, some, st.floats(1, 4))
def test_of_two_equal_modules_the_rule_is_the_one_that_is_written_down(c: float, g: float, s: float):
    both = (times(c, g, s),) * 2
    assert plain_ms(both) == pytest.approx(max(2 * c, 2 * g))
    assert lanes_ms(both) == pytest.approx(c + max(c, s * g))
    if abs(c - (2 - s) * g) > 1e-6 * (c + g):
        assert (lanes_ms(both) < plain_ms(both)) == (c < (2 - s) * g)


@pytest.mark.parametrize(
    ("c", "s", "lever"), [(1.0, 1.5, "lanes"), (6.0, 1.5, "graphs"), (12.0, 1.5, "graphs"), (1.0, 2.5, "neither")]
)
def test_the_rule_names_the_lever(c: float, s: float, lever: str):
    assert lever_of([(times(c, 10.0, s),) * 2]) == lever


def linear(name: str) -> Subject:
    return Subject(name, nn.Linear(8, 8), (torch.ones(4, 8),), {})


def test_launches_and_slowdowns_are_measured_on_streams_without_a_race():
    backend = fake_backend()
    bench = Bench(backend=backend, budget=Budget(), dry_run=True)
    stage = [(linear("left"), 3), (linear("right"), 1)]
    with backend.api.watching():
        found = list(measure_rule([stage], bench, step_ms=1e6, until_s=1e6))
    assert [(f.name, f.labels.get("module"), f.labels.get("quota"), f.source) for f in found] == [
        ("launch_ms", "left", None, "measured"),
        ("device_ms", "left", None, "measured"),
        ("launch_ms", "right", None, "measured"),
        ("device_ms", "right", None, "measured"),
        ("slowdown", "left", "3", "measured"),
        ("slowdown", "right", "1", "measured"),
        ("rule_plain_ms", None, None, "predicted"),
        ("rule_lanes_ms", None, None, "predicted"),
        ("rule_speedup", None, None, "predicted"),
    ]
    assert all(isinstance(figure, Figure) and figure.value is not None and figure.value > 0 for figure in found)


def test_a_batch_that_the_largest_was_cut_to_is_not_measured_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_models, "samples_that_fit", lambda name, memory_bytes: 4)
    bench = Bench(backend=HostBackend(num_slots=2), budget=Budget(), dry_run=False)
    assert list(gpu_models.measure_model(bench, name="ctvlm", batch=4)) == []
    assert bench.verdict == "measured as models/ctvlm/8: memory holds a batch of 4"
