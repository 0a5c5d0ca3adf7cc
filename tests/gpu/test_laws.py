"""The engine's laws on a GPU, from the recipes that the host and the fake streams run: colocated is equal to plain.

Each runs twice: modules are launched on their lanes, and as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import engine_cases
import pytest
import torch
from engine_cases import assert_near
from hidden_state_cases import BETWEEN, CASES, EAGER, held_back, is_hooked, run_on_streams, shown, train
from loop_cases import LOOPS, check, check_removing_between_forward_and_backward
from no_trace_cases import DOINGS, by_plan, by_profile, made, no_trace
from random_models import Recipe, for_recipes, train_on_streams
from stream_cases import colocated

from bench.sweep.device import on
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.errors import MosaicError

pytestmark = [
    pytest.mark.gpu,
    # A weight between modules that two lanes use gets gradients from both streams; autograd orders them, and says so.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
]


@pytest.fixture(autouse=True)
def placed(cuda_backend: CudaBackend) -> Iterator[None]:
    """Models and batches are on the GPU, and its products are exact."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with on(cuda_backend.torch_device):
        yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=[False, True], ids=["launched", "graphs"])
def graphs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def on_lanes(cuda_backend: CudaBackend, graphs: bool) -> Callable[..., Any]:
    """Returns the context manager that colocates on the GPU."""
    return partial(colocated, backend=cuda_backend, graphs=graphs)


def test_random_models_and_loops_are_equal_to_plain_training(on_lanes: Callable[..., Any]):
    def check_recipe(recipe: Recipe) -> None:
        compare = partial(assert_near, of_largest=0.05) if recipe.autocast else assert_near
        train_on_streams(recipe, on_lanes, compare=compare)

    for_recipes(check_recipe, 12)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_equal_to_the_plain_one(name: str, on_lanes: Callable[..., Any]):
    check(LOOPS[name], partial(engine_cases.run_both, colocated=on_lanes, compare=assert_near), LOOPS[name].cuda)


def test_removing_between_forward_and_backward_is_equal_and_refused_by_name_of_graphs(
    on_lanes: Callable[..., Any], graphs: bool
):
    with pytest.raises(MosaicError, match="run backward before closing them") if graphs else nullcontext():
        check_removing_between_forward_and_backward(on_lanes, assert_near)


@pytest.mark.parametrize("in_sample", [False, True], ids=["only in the loop", "in the sample"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_done_around_a_call_is_seen_by_the_call(
    case: str, in_sample: bool, graphs: bool, cuda_backend: CudaBackend
):
    make, captured = partial(shown, case, in_sample), case not in EAGER
    options = {"graphs": graphs, "captured": captured, "in_place": in_sample}
    run_on_streams(make, train, backend=cuda_backend, compare=assert_near, **options)


@pytest.mark.parametrize("case", BETWEEN)
def test_what_is_done_between_the_model_s_calls_is_seen(case: str, graphs: bool, cuda_backend: CudaBackend):
    options = {"graphs": graphs, "captured": not held_back(case), "hooked": is_hooked(case)}
    run_on_streams(*BETWEEN[case], backend=cuda_backend, compare=assert_near, **options)


@pytest.mark.parametrize("name", [name for name in DOINGS if name != "by numpy"])
def test_what_a_forward_does_is_undone(name: str, cuda_backend: CudaBackend):
    model, batch = made([name])
    with no_trace(model, batch):
        by_plan(model, batch, cuda_backend).remove()


def test_profiling_is_undone(cuda_backend: CudaBackend):
    model, batch = made([name for name in DOINGS if name != "by numpy"])
    with no_trace(model, batch):
        handle = by_profile(model, batch, cuda_backend)
        assert handle.profile is not None
        handle.remove()
