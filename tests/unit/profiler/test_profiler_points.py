"""Which points are measured, what is composed of them, and what happens where a module cannot run."""

from __future__ import annotations

import dataclasses
import weakref
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from engine_cases import FAST, TwoTowers, pair_batch, tower
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.cost import CostModel
from mosaic.device import Device
from mosaic.engine import find_modules
from mosaic.errors import InvalidPlanError, UnstableMeasurementError, UnsupportedModelError
from mosaic.hardware import Cluster, Link, find_hardware
from mosaic.profile import Phase, Profile, Sample
from mosaic.profiler import ProfileSettings, Ring, Subject, profile_modules
from mosaic.profiler.measuring import beside as besides
from mosaic.profiler.measuring import points as pointing
from mosaic.profiler.measuring.attempt import attempt
from mosaic.profiler.measuring.batch import split_batch
from mosaic.profiler.measuring.beside import measure_beside
from mosaic.profiler.measuring.measure import StepTimes
from mosaic.profiler.measuring.points import compose
from mosaic.profiler.quotas import Sampling

ALONE = dataclasses.replace(FAST, pairs=False)
RING = Ring(latency_us=10.0, gb_per_s=1.0)


def profiled(model: nn.Module, *, slots: int = 2, settings: ProfileSettings = ALONE, **options: Any) -> Profile:
    finding = find_modules(model, pair_batch())
    backend = HostBackend(num_slots=slots)
    return profile_modules(model, finding.subjects, finding.graph, backend, settings=settings, **options)


def device(slots: int) -> Device:
    return Device(name="a device", kind="cuda", num_slots=slots)


class Fails(nn.Module):
    """Fails on lanes of some widths: a lane's thread has as many threads for operators as it has slots."""

    def __init__(self, error: Exception, *widths: int, backward: bool = False) -> None:
        super().__init__()
        self.inner = tower()
        self.error, self.widths, self.in_backward = error, widths, backward
        self.armed = True

    def _check(self) -> None:
        if self.armed and torch.get_num_threads() in self.widths:
            raise self.error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_backward:
            self._check()
        out = self.inner(x)
        if self.in_backward and out.requires_grad:
            out.register_hook(lambda grad: self._check())
        return out


def failing(error: Exception, *widths: int, **how: bool) -> TwoTowers:
    """Fails where it is profiled, not where it is found."""
    model = TwoTowers(right=Fails(error, *widths, **how))
    model.right.armed = False
    return model


def find_then_arm(model: Any, **options: Any) -> Profile:
    finding = find_modules(model, pair_batch())
    model.right.armed = True
    return profile_modules(model, finding.subjects, finding.graph, HostBackend(num_slots=3), settings=ALONE, **options)


@pytest.mark.parametrize("backward", [False, True])
def test_a_module_that_runs_out_of_memory_at_one_quota_is_infeasible_there_and_the_rest_goes_on(backward: bool):
    model = failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n20 GiB"), 1, backward=backward)
    profile = find_then_arm(model)
    failed = [sample for sample in profile.samples if sample.infeasible is not None]
    assert {(s.module, s.phase, s.quota) for s in failed} == {("right", phase, 1) for phase in Phase}
    assert {s.infeasible for s in failed} == {"out of memory: CUDA out of memory. Tried to allocate"}
    assert len(profile.samples) == 2 * 2 * 3
    cost = CostModel.from_profile(profile, interference="none")
    assert cost.quotas("right") == (2, 3)
    assert cost.quotas("left") == (1, 2, 3)


def test_an_exception_at_one_quota_is_kept_with_its_text():
    profile = find_then_arm(failing(KeyError("no such codebook"), 3))
    (reason,) = {sample.infeasible for sample in profile.samples if sample.infeasible}
    assert reason == "KeyError: 'no such codebook'"
    # It is resident all the same; what it keeps on the whole device is not known.
    (memory,) = [entry for entry in profile.memory if entry.module == "right"]
    assert memory.resident_bytes > 0
    assert memory.num_trained is not None
    assert memory.num_trained > 0


def test_a_module_that_fails_everywhere_is_an_error_with_its_name_and_text():
    with pytest.raises(
        UnsupportedModelError, match=r"'right' ran at no quota; it raised ValueError: odd length\. Mend"
    ):
        find_then_arm(failing(ValueError("odd length"), 1, 2, 3))


def test_memory_that_runs_out_everywhere_says_nothing_about_the_module():
    with pytest.raises(UnstableMeasurementError, match="'right' ran at no quota; it raised out of memory: no more"):
        find_then_arm(failing(torch.OutOfMemoryError("no more"), 1, 2, 3))


def test_a_failure_side_by_side_costs_the_pair_alone(caplog: pytest.LogCaptureFixture):
    model = failing(RuntimeError("too wide"), 1)
    finding = find_modules(model, pair_batch())
    model.right.armed = True
    backend = HostBackend(num_slots=2)
    profile = profile_modules(model, finding.subjects, finding.graph, backend, quotas=[2], settings=FAST)
    assert profile.pairs == ()
    assert len(profile.samples) == 4
    assert "left and right were not measured side by side: RuntimeError: too wide" in caplog.text


def test_interrupts_are_no_properties_of_a_module():
    with pytest.raises(KeyboardInterrupt), attempt():
        raise KeyboardInterrupt
    with attempt() as tried:
        raise ValueError
    assert tried.reason == "ValueError"


def test_memory_that_ran_out_is_let_go_before_the_next_measurement():
    held: list[weakref.ref[torch.Tensor]] = []

    def exhaust() -> None:
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no more")

    with HostBackend(num_slots=1).open_lanes([(0,)]) as lanes:
        with attempt() as tried:
            lanes.lane((0,)).submit(exhaust).wait()
        assert held[0]() is None
    assert tried.reason == "out of memory: no more"


class Bends:
    """Replaces measuring by a module that scales up to a knee, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, knee: float) -> None:
        self.quotas: list[int] = []

        def measure(subject: Subject, lane: Any, settings: ProfileSettings) -> StepTimes:
            quota = len(lane.slots)
            self.quotas.append(quota)
            time = max(1 / quota, 1 / knee)
            return StepTimes((10 * time,) * 5, (20 * time,) * 5)

        monkeypatch.setattr(pointing, "measure", measure)


def test_held_out_errors_are_kept_where_there_are_enough_samples(monkeypatch: pytest.MonkeyPatch):
    Bends(monkeypatch, knee=4)
    profile = profiled(TwoTowers(), slots=8, quotas="all")
    assert {(error.subject, error.phase) for error in profile.held_out} == {
        (name, phase) for name in ("left", "right") for phase in Phase
    }
    assert all(error.count == 6 for error in profile.held_out)
    assert profiled(TwoTowers()).held_out == ()


@pytest.mark.parametrize(
    ("choice", "slots", "expected"),
    [
        ("tenths", 20, tuple(range(2, 21, 2))),
        ("all", 3, (1, 2, 3)),
        ((4, 2, 2), 4, (2, 4)),
    ],
)
def test_choices_of_quotas(choice: Any, slots: int, expected: tuple[int, ...]):
    sampling = Sampling.choose(choice, [1], device(slots))
    assert sampling.quotas == expected


@pytest.mark.parametrize(
    ("quotas", "degrees", "error"),
    [("most", [1], ValueError), ([], [1], ValueError), ([1], [0], ValueError), ([9], [1], InvalidPlanError)],
)
def test_choices_that_cannot_be_are_refused(quotas: Any, degrees: list[int], error: type[Exception]):
    with pytest.raises(error):
        Sampling.choose(quotas, degrees, device(8))


def subject(*args: Any, **kwargs: Any) -> Subject:
    return Subject("vision", nn.Linear(8, 4), args, kwargs)


def test_a_replica_gets_its_share_of_every_tensor_rounded_up():
    x, mask = torch.randn(6, 8, requires_grad=True), torch.ones(6, 3, dtype=torch.bool)
    cut = split_batch(subject(x, {"mask": [mask]}, scale=torch.tensor(2.0), positions=torch.arange(8)[None]), 4)
    assert torch.equal(cut.args[0], x[:2])
    assert cut.args[0].requires_grad
    assert cut.args[0].is_leaf
    assert cut.args[1]["mask"][0].shape == (2, 3)
    assert cut.kwargs["scale"].dim() == 0
    assert cut.kwargs["positions"].shape == (1, 8)


def test_a_module_without_a_batch_cannot_be_split():
    for args, shapes in (((torch.ones(4, 8), torch.ones(3, 8)), r"\(4, 8\), \(3, 8\)"), ((3,), "no tensors")):
        with pytest.raises(UnsupportedModelError, match=rf"'vision' cannot be split over 2 devices: .*{shapes}"):
            split_batch(subject(*args), 2)
    with pytest.raises(UnsupportedModelError, match="batch of 4, which is less than one sample for each of 8"):
        split_batch(subject(torch.ones(4, 8)), 8)
    alone = subject(3)
    assert split_batch(alone, 1) is alone


def test_degrees_are_composed_of_a_share_of_the_batch_and_communication():
    with pytest.raises(ValueError, match=r"degrees \(1, 2\) need communication"):
        profiled(TwoTowers(), degrees=[2])
    rows: SimpleQueue[int] = SimpleQueue()  # which is not put back, though a hook encloses it
    model = TwoTowers()
    model.left.register_forward_pre_hook(lambda _, args: rows.put(len(args[0])))
    profile = profiled(model, degrees=[1, 2, 8], network=RING)
    assert {rows.get() for _ in range(rows.qsize())} == {6, 3}
    found = {(s.degree, s.source, s.infeasible is None) for s in profile.samples}
    assert found == {(1, "measured", True), (2, "composed", True), (8, "composed", False)}
    trained = sum(parameter.nbytes for parameter in model.left.parameters())
    reduce_ms = RING.all_reduce_ms(trained, 2)
    (backward,) = [s for s in profile.samples_of("left", Phase.BACKWARD, 2) if s.quota == 1]
    assert reduce_ms > 0.02
    assert min(backward.times_ms) > reduce_ms
    assert CostModel.from_profile(profile, interference="none").degrees("left") == (1, 2)


def test_composing_adds_communication_to_the_backward_alone():
    of = {p: Sample(module="m", phase=p, quota=1, degree=4, times_ms=(1.0, 2.0)) for p in Phase}
    forward, backward = (compose(of[phase], RING, 1_000_000) for phase in Phase)
    # Six steps of 10 us, and 1.5 MB at 1 GB/s.
    assert forward.times_ms == (1.0, 2.0)
    assert backward.times_ms == pytest.approx((2.56, 3.56))
    assert {forward.source, backward.source} == {"composed"}
    link = Link(gb_per_s=1.0, latency_us=10.0)
    hardware = dataclasses.replace(
        find_hardware("host"), efficiency=dataclasses.replace(find_hardware("host").efficiency, network=1.0)
    )
    cluster = Cluster(hardware=hardware, gpus_per_node=4, intra_node=link, inter_node=link)
    assert compose(of[Phase.BACKWARD], cluster, 1_000_000).times_ms == pytest.approx(backward.times_ms)
    single = dataclasses.replace(of[Phase.BACKWARD], degree=1)
    assert compose(single, None, 1) is single


def test_more_than_two_modules_are_timed_side_by_side():
    subjects = [dataclasses.replace(subject(torch.randn(6, 8)), name=name) for name in ("one", "two", "three")]
    with HostBackend(num_slots=3).open_lanes([(0,), (1,), (2,)]) as lanes:
        found = measure_beside(subjects, [lanes.lane((slot,)) for slot in range(3)], Phase.FORWARD, FAST)
    assert len(found) in (0, 3)  # on a busy machine threads may never meet
    assert all(times.beside_ms and times.alone_ms for times in found)


def test_modules_that_never_meet_are_tried_again_and_then_left_out(monkeypatch: pytest.MonkeyPatch):
    tries: list[int] = []

    def miss(*_: object, **__: object) -> list[tuple[float, ...]]:
        tries.append(1)
        return [(), (1.0,)]

    monkeypatch.setattr(besides, "_beside", miss)
    both = [subject(torch.randn(6, 8)), dataclasses.replace(subject(torch.randn(6, 8)), name="audio")]
    with HostBackend(num_slots=2).open_lanes([(0,), (1,)]) as lanes:
        apart = [lanes.lane((0,)), lanes.lane((1,))]
        assert measure_beside(both, apart, Phase.FORWARD, FAST) == ()
    assert len(tries) == 3
