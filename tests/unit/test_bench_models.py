"""How ``bench.gpu`` measures a model: what comes first, what a failure costs, and the rule of thumb beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fake_streams import FakeGreenDriver, FakeStreams
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bench import gpu_models
from bench.gpu_bench import Bench
from bench.gpu_models import IN_TURN, WORTH
from bench.gpu_rounds import Rounds
from bench.gpu_variants import Step, Workload, with_sm_targets
from bench.record import Figure
from bench.rule_of_thumb import ModuleTimes, lanes_ms, lever_of, measure_rule, plain_ms, predictions_of
from mosaic.backends.cuda import CudaBackend
from mosaic.backends.host import HostBackend
from mosaic.errors import BackendUnavailableError
from mosaic.microbench import Budget
from mosaic.profiler import Subject


def rehearsal(seconds: float = float("inf")) -> Bench:
    return Bench(backend=HostBackend(num_slots=2), budget=Budget(seconds), dry_run=True)


def test_what_needs_no_profile_is_measured_before_it_and_a_profile_that_fails_costs_its_plan_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    order: list[str] = []

    def profile(*args: object) -> object:
        raise RuntimeError("cuDNN error")

    monkeypatch.setattr(gpu_models, "_plan", profile)
    bench = rehearsal()
    found = []
    for figure in gpu_models.measure_model(bench, name="clip", batch=2):
        found.append(figure)
        order.append(figure.labels.get("variant", figure.name))
    seen = list(dict.fromkeys(order))
    assert [name for name in seen if name in ("plain", "slowdown", *WORTH)] == [
        *("plain", "plain, one CUDA graph", "plain streams", "slowdown"),
        *("green lanes", "green lanes, graphs", "green lanes, SM targets", "mosaic", "mosaic, graphs", IN_TURN),
    ]
    (failed,) = (figure for figure in found if figure.name == "plan")
    assert failed.reason == "RuntimeError: cuDNN error"
    measured = {figure.labels["variant"] for figure in found if figure.name == "step_ms" and figure.value is not None}
    assert measured == {"plain", "green lanes", "mosaic", IN_TURN}  # a rehearsal runs some plan in any case
    assert {figure.source for figure in found if figure.name.startswith("rule_")} == {"predicted"}


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


def test_no_piece_takes_more_than_its_share_of_the_time_left_for_it_and_all_after_it(work: Workload):
    bench = rehearsal(100.0)
    bench.budget._start -= 20.0  # 80 s are left
    rounds = Rounds(work, bench, {"first": 1.0, "second": 2.0, "third": 1.0})
    assert rounds.share_s("first") == pytest.approx(20, abs=0.5)
    assert rounds.share_s("second") == pytest.approx(53.3, abs=0.5)
    assert rounds.share_s("third") == pytest.approx(80, abs=0.5)


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
    assert set(rounds.step_ms) == {"plain", "right"}
    rounds.step_ms["plain"] = 2 * rounds.step_ms["right"]
    assert rounds.won("right", over="plain")
    assert not rounds.won("wrong", over="plain")
    assert not rounds.won("plain", over="right")


def test_sm_targets_are_asked_of_the_backend_and_missing_ones_are_said():
    class Targeted(HostBackend):
        def __init__(self, ordinal: int = 0, *, sm_target: bool = False) -> None:
            super().__init__(num_slots=2)
            self.sm_target = sm_target

    assert with_sm_targets(Targeted()).sm_target  # type: ignore[attr-defined]
    with pytest.raises(BackendUnavailableError, match="without sm_target"):
        with_sm_targets(HostBackend(num_slots=2))


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


@given(st.lists(st.tuples(some, some, st.floats(1, 4)), min_size=1, max_size=5))
def test_lanes_take_as_long_as_all_launches_and_as_the_longest_module_at_least(modules: list[tuple[float, ...]]):
    stage = tuple(times(*each) for each in modules)
    assert lanes_ms(stage) >= sum(each.launch_ms for each in stage) - 1e-6
    assert lanes_ms(stage) >= max(each.slowdown * each.device_ms for each in stage) - 1e-6


@pytest.mark.parametrize(
    ("c", "s", "lever"), [(1.0, 1.5, "lanes"), (6.0, 1.5, "graphs"), (12.0, 1.5, "graphs"), (1.0, 2.5, "neither")]
)
def test_the_rule_names_the_lever(c: float, s: float, lever: str):
    assert lever_of([(times(c, 10.0, s),) * 2]) == lever


def test_predictions_are_of_the_whole_step_and_never_measured():
    stages = [(times(1.0, 10.0, 1.5),) * 2] * 2
    found = {figure.name: figure for figure in predictions_of(stages, 60.0)}
    assert {figure.source for figure in found.values()} == {"predicted"}
    assert found["rule_plain_ms"].value == 40.0
    assert found["rule_lanes_ms"].value == 32.0
    assert found["rule_speedup"].value == pytest.approx(60 / 52)
    (short,) = (figure for figure in predictions_of(stages, 30.0) if figure.name == "rule_speedup")
    assert (short.value, short.source) == (None, "predicted")


def test_launches_and_slowdowns_are_measured_on_streams_without_a_race():
    backend = CudaBackend(api=FakeStreams(), driver=FakeGreenDriver(num_slots=4))
    bench = Bench(backend=backend, budget=Budget(), dry_run=True)
    given = torch.ones(4, 8)
    stage = [(Subject(name, nn.Linear(8, 8), (given,), {}), quota) for name, quota in (("left", 3), ("right", 1))]
    with backend.api.watching():
        found = list(measure_rule([stage], bench, 1e6))
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
