"""``mosaic.colocate`` from end to end: bad input, what stays as it was, errors, and the way back."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_cases import (
    FAST,
    SIDE_BY_SIDE,
    Trap,
    TwoTowers,
    assert_trains_like_plain,
    colocate,
    pair_batch,
)
from stream_cases import FakeBackend
from torch import nn
from torch.distributed.fsdp import FSDPModule

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import Handle
from mosaic.errors import (
    InvalidFileError,
    InvalidPlanError,
    InvalidProfileError,
    UnsupportedModelError,
)

# Bad input.


@pytest.mark.parametrize("handle", ["host"], indirect=True)
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
    assert all("runs in place" in line and "other shapes than planned" in line for line in said)
    assert "3 calls of left ran in place" in handle.describe()
    assert handle.metrics()["calls_in_place"] == 6


def test_a_profile_of_another_device_or_model_is_refused(model: TwoTowers):
    profile = mosaic.colocate(
        model, sample=pair_batch(), backend=HostBackend(num_slots=1), options=mosaic.Options(profiling=FAST)
    ).profile
    assert profile is not None
    with pytest.raises(InvalidProfileError, match="2 slots; profile again"):
        mosaic.colocate(
            model, sample=pair_batch(), options=mosaic.Options(profile=profile), backend=HostBackend(num_slots=2)
        )
    with pytest.raises(InvalidProfileError, match="profile this model again"):
        mosaic.colocate(
            model, sample=pair_batch(rows=3), options=mosaic.Options(profile=profile), backend=HostBackend(num_slots=1)
        )


def test_wrapped_models_are_refused_with_the_way_out(model: TwoTowers):
    with pytest.raises(UnsupportedModelError, match=r"DataParallel: its hooks .* colocate the plain model"):
        mosaic.colocate(nn.DataParallel(model), sample=pair_batch())
    with pytest.raises(UnsupportedModelError, match="OptimizedModule"):
        mosaic.colocate(torch.compile(model, backend="eager"), sample=pair_batch())
    model.left.__class__ = type("FSDPTower", (FSDPModule, type(model.left)), {})  # as fully_shard does
    with pytest.raises(UnsupportedModelError, match=r"left is a FSDPModule: .* colocate the plain model"):
        mosaic.colocate(model, sample=pair_batch())


def test_graphs_on_the_host_and_a_module_with_graphs_of_the_compilers_are_refused(model: TwoTowers):
    with pytest.raises(ValueError, match="cuda_graphs=True"):
        mosaic.colocate(model, sample=pair_batch(), options=mosaic.Options(cuda_graphs=True))
    model.left.compile(mode="reduce-overhead")
    with pytest.raises(UnsupportedModelError, match=r"'left' is compiled with CUDA graphs .* without a mode"):
        mosaic.colocate(model, sample=pair_batch(), backend=FakeBackend())


def test_colocating_twice_is_refused_and_leaves_the_first(model: TwoTowers, handle: Handle):
    for again in (model, nn.ModuleDict({"inner": model.left})):
        with pytest.raises(UnsupportedModelError, match=r"(the model|inner) is colocated already; remove\(\)"):
            mosaic.colocate(again, sample=pair_batch(), backend=HostBackend(num_slots=2))
    assert_trains_like_plain(model, handle)


def test_plans_profiles_backends_and_modules_may_be_paths_and_names(model: TwoTowers, tmp_path: Path):
    first = colocate(model, pair_batch(), SIDE_BY_SIDE)
    plan, path = first.plan, tmp_path / "plan.json"
    plan.save(path)
    first.remove()
    handle = mosaic.colocate(model, pair_batch(), plan=str(path), backend="host", exclude="left.*")
    assert handle.plan == plan == mosaic.load(path)
    handle.remove()
    profiled = mosaic.colocate(
        model, pair_batch(), modules="left", options=mosaic.Options(profiling=FAST, method="sequential")
    )
    assert profiled.graph.names == ("left",)
    assert profiled.profile is not None
    profiled.profile.save(tmp_path / "profile.json")
    options = mosaic.Options(profile=tmp_path / "profile.json")
    assert options.profile == profiled.profile == mosaic.load(tmp_path / "profile.json")
    profiled.remove()
    with pytest.raises(InvalidFileError, match=r"profile.json has schema_version=7, but a Plan needs 4"):
        mosaic.colocate(model, pair_batch(), plan=tmp_path / "profile.json")
    with pytest.raises(ValueError, match="unknown backend 'gpu'; choose one of: cuda, host, or cuda:1"):
        mosaic.colocate(model, pair_batch(), backend="gpu")
    with pytest.raises(InvalidPlanError, match="the plan is for 2 devices, and this is one process"):
        mosaic.colocate(model, pair_batch(), plan=replace(plan, num_devices=2))
    with pytest.raises(TypeError, match=r"not names of modules; use a name or pattern"):
        mosaic.colocate(model, pair_batch(), modules=[model.left])
    with pytest.raises(TypeError, match="is not a model"):
        mosaic.colocate(TwoTowers, pair_batch())


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


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_plain_and_runs_its_own_weights(model: TwoTowers, handle: Handle, way: str):
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_is_exported_or_traced_is_the_plain_model(model: TwoTowers, handle: Handle):
    batch = pair_batch()
    with handle.disabled():
        expected = torch.export.export(model, batch)
    model(*batch).sum().backward()
    assert str(torch.export.export(model, batch).graph) == str(expected.graph)
    assert torch.equal(torch.jit.trace(model, batch)(*batch), model(*batch))


def test_a_parameter_may_give_way_to_another_of_the_same_value(model: TwoTowers):
    model.left.scale = nn.Parameter(torch.tensor(1.5))
    model.left.register_forward_hook(lambda module, args, result: result * module.scale)
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    for _ in range(3):
        model.left.scale = nn.Parameter(model.left.scale.detach().clone())
        (gradient,) = torch.autograd.grad(model(*pair_batch()).sum(), [model.left.scale])
        assert gradient.isfinite()
    handle.remove()


def test_remove_gives_the_plain_model_back(model: TwoTowers, handle: Handle):
    before, num_threads = threading.active_count(), 0 if handle._executor.lanes.launches_inline else 2
    kept = model.left(pair_batch()[0])
    handle.remove()
    handle.remove()
    assert threading.active_count() == before - num_threads
    assert type(model) is TwoTowers
    assert type(model.left) is Trap
    assert torch.equal(kept, model.left(pair_batch()[0]))
    (kept * 2).sum().backward()
    assert type(model.left.layers[0].weight.grad) is torch.Tensor
