"""``mosaic.colocate`` from end to end: bad input, what stays as it was, errors, and the way back."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_cases import FAST, SIDE_BY_SIDE, TwoTowers, colocate, pair_batch, plan_for, tower
from torch import nn
from torch.distributed.fsdp import FSDPModule

import mosaic
from mosaic.backends.host import HostBackend
from mosaic.engine import Handle
from mosaic.errors import (
    BackendUnavailableError,
    InvalidPlanError,
    InvalidProfileError,
    ModuleContractError,
    UnsupportedModelError,
)


class Trap(nn.Module):
    """A module that does what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()
        self.order = "work"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        if self.order == "fail":
            raise ValueError("forward failed")
        if self.order == "interrupt":
            raise KeyboardInterrupt
        if self.order == "shape":
            return hidden[:, :3]
        if self.order == "backward":
            hidden.register_hook(fail_backward)
        return hidden.clone()


def fail_backward(grad: torch.Tensor) -> torch.Tensor:
    raise ValueError("backward failed")


@pytest.fixture
def model() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


@pytest.fixture
def handle(model: TwoTowers) -> Iterator[Handle]:
    found = colocate(model, pair_batch(), SIDE_BY_SIDE)
    for step in range(2):
        model(*pair_batch(step)).sum().backward()
    model.zero_grad()
    yield found
    found.remove()


def assert_trains_like_plain(model: TwoTowers, handle: Handle) -> None:
    """One step on lanes and one without give the same gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gradients: list[Any] = []
    for on in (True, False):
        model.zero_grad()
        if on:
            spans = len(handle.timeline().spans)
            model(*pair_batch(7)).square().mean().backward()
            assert len(handle.timeline().spans) > spans
        else:
            with handle.disabled():
                model(*pair_batch(7)).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# Bad input.


def test_a_model_without_modules_to_place_is_refused():
    with pytest.raises(UnsupportedModelError, match="found no module to place"):
        mosaic.colocate(nn.Linear(8, 8), sample=pair_batch()[0], settings=FAST)


def test_other_shapes_than_profiled_run_in_place_and_are_said_once(
    model: TwoTowers, handle: Handle, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger="mosaic"):
        for step in range(3):
            got = model(*pair_batch(step, rows=4))
            with handle.disabled():
                assert torch.allclose(got, model(*pair_batch(step, rows=4)), atol=1e-5)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("runs in place" in line and "other shapes than the plan was made for" in line for line in said)
    assert "3 calls of left ran in place" in handle.describe()
    assert handle.metrics()["calls_in_place"] == 6


def test_a_plan_with_more_slots_than_the_device_is_refused(model: TwoTowers):
    plan = plan_for(model, pair_batch(), [{"left": 3, "right": 1}], HostBackend(num_slots=4))
    with pytest.raises(InvalidPlanError, match=r"4 slots; this device is .* with 2"):
        mosaic.colocate(model, sample=pair_batch(), plan=plan, backend=HostBackend(num_slots=2))
    assert type(model.left) is Trap


def test_a_plan_of_another_model_is_refused(model: TwoTowers):
    plan = plan_for(model, pair_batch(rows=3), SIDE_BY_SIDE, HostBackend(num_slots=2))
    with pytest.raises(InvalidPlanError, match="plan again for this model"):
        mosaic.colocate(model, sample=pair_batch(), plan=plan, backend=HostBackend(num_slots=2))


def test_a_profile_of_another_device_or_model_is_refused(model: TwoTowers):
    profile = mosaic.colocate(model, sample=pair_batch(), backend=HostBackend(num_slots=1), settings=FAST).profile
    assert profile is not None
    with pytest.raises(InvalidProfileError, match="profile again on this device"):
        mosaic.colocate(model, sample=pair_batch(), profile=profile, backend=HostBackend(num_slots=2))
    with pytest.raises(InvalidProfileError, match="profile this model again"):
        mosaic.colocate(model, sample=pair_batch(rows=3), profile=profile, backend=HostBackend(num_slots=1))


def test_a_model_on_another_device_is_refused():
    with pytest.raises(BackendUnavailableError, match="is on meta"):
        mosaic.colocate(TwoTowers().to("meta"), sample=pair_batch(), backend=HostBackend(num_slots=2))


def test_wrapped_models_are_refused_with_the_way_out(model: TwoTowers):
    with pytest.raises(UnsupportedModelError, match=r"DataParallel: its hooks .* colocate the plain model"):
        mosaic.colocate(nn.DataParallel(model), sample=pair_batch())
    with pytest.raises(UnsupportedModelError, match="OptimizedModule"):
        mosaic.colocate(torch.compile(model, backend="eager"), sample=pair_batch())


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model_is_refused(model: TwoTowers):
    kind = type("FSDPTower", (FSDPModule, type(model.left)), {})  # what fully_shard does, without a process group
    model.left.__class__ = kind
    with pytest.raises(UnsupportedModelError, match=r"left is a FSDPModule: .* colocate the plain model"):
        mosaic.colocate(model, sample=pair_batch())


def test_distributed_wrappers_are_refused(model: TwoTowers, tmp_path: Any):
    from torch.distributed import destroy_process_group, init_process_group

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(UnsupportedModelError, match="DistributedDataParallel"):
            mosaic.colocate(wrapped, sample=pair_batch())
    finally:
        destroy_process_group()


def test_colocating_twice_is_refused_and_leaves_the_first(model: TwoTowers, handle: Handle):
    with pytest.raises(ValueError, match="colocated already"):
        colocate(model, pair_batch(), SIDE_BY_SIDE)
    assert_trains_like_plain(model, handle)


def test_a_small_gain_leaves_the_model_as_it_was_and_says_so(model: TwoTowers, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="mosaic"):
        handle = mosaic.colocate(model, sample=pair_batch(), backend=HostBackend(num_slots=1), settings=FAST)
    assert not handle.active
    assert type(model.left) is Trap
    assert "the model is left as it was" in handle.describe()
    assert any("left as it was" in record.getMessage() for record in caplog.records)
    assert handle.metrics()["steps"] == 0
    handle.remove()


def test_a_given_plan_runs_as_it_is(model: TwoTowers):
    handle = colocate(model, pair_batch(), [{"left": 1}, {"right": 2}])
    assert handle.active
    assert [stage.names for stage in handle.plan.stages] == [("left",), ("right",)]
    handle.remove()
    assert not handle.active


def test_a_profile_taken_by_colocating_leaves_no_trace(model: TwoTowers):
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    mosaic.colocate(model, sample=pair_batch(), backend=HostBackend(num_slots=2), settings=FAST).remove()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# What stays as it was.


def test_keys_types_and_references_stay(model: TwoTowers, handle: Handle):
    plain = TwoTowers(Trap(), Trap())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert isinstance(model, TwoTowers)
    assert isinstance(model.left, Trap)
    assert type(model.left).__name__ == "Trap"
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    model.eval()
    assert not model.left.layers.training
    model.train()
    assert_trains_like_plain(model, handle)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_a_copy_is_plain_and_runs_its_own_weights(model: TwoTowers, handle: Handle, way: str):
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is TwoTowers
    assert type(twin.left) is Trap
    before = model(*pair_batch()).detach().clone()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    spans = len(handle.timeline().spans)
    assert not twin(*pair_batch()).any()
    assert len(handle.timeline().spans) == spans
    assert torch.equal(model(*pair_batch()), before)


def test_the_model_returns_plain_tensors(model: TwoTowers, handle: Handle):
    assert type(model(*pair_batch())) is torch.Tensor


def test_disabled_runs_the_plain_model(model: TwoTowers, handle: Handle):
    spans = len(handle.timeline().spans)
    with handle.disabled():
        assert not handle.active
        assert type(model.left(pair_batch()[0])) is torch.Tensor
        model(*pair_batch()).sum().backward()
    assert handle.active
    assert len(handle.timeline().spans) == spans


def test_remove_gives_the_plain_model_back(model: TwoTowers, handle: Handle):
    before = threading.active_count()
    kept = model.left(pair_batch()[0])
    handle.remove()
    handle.remove()
    assert threading.active_count() == before - 2
    assert type(model) is TwoTowers
    assert type(model.left) is Trap
    assert torch.equal(kept, model.left(pair_batch()[0]))
    (kept * 2).sum().backward()
    assert type(model.left.layers[0].weight.grad) is torch.Tensor


def test_timeline_and_metrics_tell_what_ran(model: TwoTowers, handle: Handle):
    metrics = handle.metrics()
    assert metrics["steps"] >= 1
    assert {"forward_ms/left", "backward_ms/right"} <= set(metrics)
    handle.clear_timeline()
    assert handle.timeline().spans == ()


# Errors inside of modules.


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_error_in_forward_reaches_the_caller_and_lanes_go_on(model: TwoTowers, handle: Handle, side: str):
    model.get_submodule(side).order = "fail"
    for _ in range(2):
        with pytest.raises(ValueError, match="forward failed") as caught:
            model(*pair_batch())
        (note,) = caught.value.__notes__
        assert f"raised in module {side!r}, called at" in note
        assert "engine_cases.py" in note
    model.get_submodule(side).order = "work"
    assert_trains_like_plain(model, handle)


def test_an_error_in_a_module_whose_result_nobody_uses_reaches_the_caller(model: TwoTowers, handle: Handle):
    model.right.order = "fail"
    plain_forward = TwoTowers.forward
    TwoTowers.forward = lambda self, x, y: (self.left(x), self.right(y))[0]  # type: ignore[method-assign]
    try:
        with pytest.raises(ValueError, match="forward failed"):
            model(*pair_batch())
    finally:
        TwoTowers.forward = plain_forward  # type: ignore[method-assign]
    model.right.order = "work"
    assert_trains_like_plain(model, handle)


def test_an_error_in_backward_reaches_the_caller_and_lanes_go_on(model: TwoTowers, handle: Handle):
    model.right.order = "backward"
    for _ in range(2):
        loss = model(*pair_batch()).sum()
        with pytest.raises(ValueError, match="backward failed") as caught:
            loss.backward()
        assert any("raised in the backward of module 'right', called at" in note for note in caught.value.__notes__)
    model.right.order = "work"
    assert_trains_like_plain(model, handle)


def test_an_interrupt_reaches_the_caller_and_lanes_go_on(model: TwoTowers, handle: Handle):
    model.left.order = "interrupt"
    with pytest.raises(KeyboardInterrupt):
        model(*pair_batch())
    model.left.order = "work"
    assert_trains_like_plain(model, handle)


def test_a_module_that_returns_another_shape_is_named(model: TwoTowers, handle: Handle):
    model.left.order = "shape"
    with pytest.raises(ModuleContractError, match=r"'left' returned .* cannot be placed: .*exclude=\['left'\]"):
        model(*pair_batch())
    model.left.order = "work"
    assert_trains_like_plain(model, handle)


def test_a_write_into_an_input_is_found_out():
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x.mul_(0.5))

    model = TwoTowers(Writing())
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        for step in range(3):
            model(*pair_batch(step))
        assert "it writes into one of its inputs" in handle.describe()
    finally:
        handle.remove()


def test_two_models_share_a_step_and_each_other_s_results():
    first, second = TwoTowers(), TwoTowers()
    handles = [colocate(each, pair_batch(), SIDE_BY_SIDE) for each in (first, second)]
    try:
        for step in range(4):
            x, y = pair_batch(step)
            shared = first.left(x)
            result = second.left(shared[:, :8]) * first.right(shared[:, 8:]) * second.right(y)
            result.sum().backward()
            assert type(first.left[0].weight.grad) is torch.Tensor
    finally:
        for handle in handles:
            handle.remove()


def test_a_model_can_be_trained_from_another_thread(model: TwoTowers, handle: Handle):
    failed: list[BaseException] = []

    def work() -> None:
        try:
            model(*pair_batch()).sum().backward()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert_trains_like_plain(model, handle)


def test_data_loader_workers_can_be_forked_afterwards(model: TwoTowers, handle: Handle):
    data = torch.utils.data.TensorDataset(*pair_batch(rows=12))
    loader = torch.utils.data.DataLoader(data, batch_size=6, num_workers=1, multiprocessing_context="fork")
    for batch in loader:
        model(*batch).sum().backward()
    assert_trains_like_plain(model, handle)


class Slow(nn.Module):
    """Waits on its lane until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower(8, 16, nn.BatchNorm1d(16))
        self.__dict__["go_on"] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.__dict__["go_on"] is not None:
            assert self.__dict__["go_on"].wait(60)
        return self.layers(x)


@pytest.mark.parametrize("change", ["mode", "step"])
def test_what_was_called_before_a_change_computes_as_before_it(change: str):
    model = TwoTowers(Slow())
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    opened = threading.Event()
    try:
        model(*pair_batch()).sum().backward()
        with handle.disabled():
            expected = model.left(pair_batch()[0]).detach()
        model.left.__dict__["go_on"] = opened
        result = model.left(pair_batch()[0])
        opening = threading.Thread(target=opened.set)  # while the caller waits in the change
        opening.start()
        if change == "mode":
            model.eval()
        else:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        opening.join()
        assert torch.allclose(result.join(), expected, atol=1e-5)
    finally:
        opened.set()
        handle.remove()


def test_plans_are_data(handle: Handle):
    assert dataclasses.is_dataclass(handle.plan)
    assert handle.plan.graph == handle.graph.fingerprint
