"""Stories: one line before a loop on one device."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from story_models import TwoTowers, assert_same_bits, make_batch, make_model, make_target, train, train_twin
from torch import Tensor, nn

import mosaic

TOWERS = ("image", "text")


def side_by_side(model: nn.Module, device: mosaic.Device | None = None, sample: Any = None) -> mosaic.Plan:
    """A plan that runs both towers at the same time, on a slot each of the host or of another device."""
    options = mosaic.Options(method="sequential")  # for the graph of the model
    handle = mosaic.colocate(model, sample or make_batch(0), modules=TOWERS, backend="host", options=options)
    handle.remove()
    return mosaic.plan_from_quotas([{"image": 1, "text": 1}], graph=handle.graph, device=device or handle.plan.device)


def assert_on_lanes(handle: mosaic.Handle) -> None:
    metrics = handle.metrics()
    assert {f"forward_ms/{name}" for name in TOWERS} <= metrics.keys(), handle.describe()
    assert metrics["calls_in_place"] == 0, handle.describe()


def test_one_line_before_the_loop_leaves_its_numbers_bit_for_bit_on_the_host():
    model = make_model()
    losses, weights = train_twin(model)
    plan = side_by_side(model)
    with_plan = mosaic.colocate(model, sample=make_batch(0), plan=plan, backend="host", modules=TOWERS)
    assert train(model) == losses
    assert_same_bits(model, weights)
    assert_on_lanes(with_plan)
    with_plan.remove()
    model = make_model()
    by_default = mosaic.colocate(model, sample=make_batch(0))  # profiles, solves and tries
    assert train(model) == losses
    assert_same_bits(model, weights)
    assert by_default.metrics()["steps"] == len(losses)
    by_default.remove()


def test_one_line_before_the_loop_leaves_its_numbers_on_streams_of_a_device():
    from stream_cases import FakeBackend  # the fake CUDA runtime, which also finds races

    backend = FakeBackend(num_slots=2)
    model = make_model()
    plan = side_by_side(model, backend.device)
    losses, weights = train_twin(model)
    with backend.api.watching():
        handle = mosaic.colocate(model, sample=make_batch(0), plan=plan, backend=backend, modules=TOWERS)
        assert train(model) == losses
        assert_on_lanes(handle)
        handle.remove()
    assert_same_bits(model, weights)


@pytest.mark.gpu
def test_one_line_before_the_loop_leaves_its_numbers_on_a_gpu():
    model = make_model().cuda()
    for one in model.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
    losses, weights = train_twin(model, lambda twin: train(twin, device="cuda"))
    batch = {name: value.cuda() for name, value in make_batch(0).items()}
    handle = mosaic.colocate(model, sample=batch, options=mosaic.Options(trial=None))
    for own, other in zip(train(model, device="cuda"), losses, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-2, atol=1e-3)
    handle.remove()


def test_a_model_without_anything_to_overlap_is_left_as_it_was():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 3)

        def forward(self, pixels: Tensor, words: Tensor) -> Tensor:
            return self.second(self.first(pixels))

    model = Chain()
    losses, weights = train_twin(model)
    handle = mosaic.colocate(model, sample=make_batch(0))
    assert not handle.active
    assert "the model is left as it was" in handle.describe()
    assert type(model.first) is nn.Linear
    assert train(model) == losses
    assert_same_bits(model, weights)
    handle.remove()


class Answer(torch.autograd.Function):
    """Waits for an answer, as modules do that ask a server, in both phases; takes no CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        time.sleep(wait_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.wait_s)
        return grads[0].clone(), None


class Asking(nn.Module):
    """A layer that asks; it may have to wait longer on other threads than the loop's."""

    def __init__(self, width: int, wait_s: float, wait_elsewhere_s: float) -> None:
        super().__init__()
        self.layer, self.waits = nn.Linear(width, 16), (wait_s, wait_elsewhere_s)

    def forward(self, x: Tensor) -> Tensor:
        is_elsewhere = threading.current_thread() is not threading.main_thread()
        return Answer.apply(self.layer(x), self.waits[is_elsewhere])


def make_asking(wait_s: float, wait_elsewhere_s: float) -> TwoTowers:
    model = make_model()
    model.image, model.text = Asking(12, wait_s, wait_elsewhere_s), Asking(6, wait_s, wait_elsewhere_s)
    return model


TRIAL = mosaic.TrialSettings(max_steps=40, max_lost_steps=60.0)


def test_the_trial_decides_by_what_it_measured():
    model = make_asking(0.03, 0.03)  # side by side they wait at the same time
    plain = copy.deepcopy(model)
    handle = mosaic.colocate(model, sample=make_batch(0), options=mosaic.Options(cache=None, trial=TRIAL))
    losses = train(model, range(44))
    described = handle.describe()
    assert "tried the plain loop: measured" in described
    assert handle.active == ("times as fast as the plain loop" in described), (
        described
    )  # a busy machine may not show it
    assert handle.metrics()["trial_steps"] > 0
    handle.remove()
    plain.image.waits = plain.text.waits = (0.0, 0.0)
    assert train(plain, range(44)) == losses


def test_the_trial_drops_a_plan_that_is_slower_than_the_loop():
    model = make_asking(0.0, 0.02)  # on lanes it has to wait
    losses, weights = train_twin(model, lambda twin: train(twin, range(44)))
    options = mosaic.Options(trial=TRIAL)
    handle = mosaic.colocate(
        model, sample=make_batch(0), plan=side_by_side(model), modules=TOWERS, backend="host", options=options
    )
    assert train(model, range(44)) == losses
    assert not handle.active, handle.describe()
    assert "the model runs as it was" in handle.describe()
    assert_same_bits(model, weights)
    handle.remove()


def test_autocast_with_a_grad_scaler_leaves_the_loops_numbers():
    def loop(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        losses = []
        for step in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(**make_batch(step)), make_target(step))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses += [loss.detach(), torch.tensor(scaler.get_scale())]
        return losses

    model = make_model()
    losses, weights = train_twin(model, loop)

    def sample() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**make_batch(0))

    plan = side_by_side(model, sample=sample)
    handle = mosaic.colocate(model, sample=sample, plan=plan, backend="host", modules=TOWERS)
    assert loop(model) == losses
    assert_same_bits(model, weights)
    assert_on_lanes(handle)
    handle.remove()


def test_a_frozen_encoder_runs_beside_the_others_and_keeps_its_weights():
    model = make_model()
    model.image.requires_grad_(False)
    frozen = copy.deepcopy(model.image.state_dict())
    losses, weights = train_twin(model)
    plan = side_by_side(model)
    handle = mosaic.colocate(model, sample=make_batch(0), plan=plan, backend="host", modules=TOWERS)
    assert train(model) == losses
    assert_same_bits(model, weights)
    assert_same_bits(model.image, frozen)
    assert_on_lanes(handle)
    assert "backward_ms/image" not in handle.metrics()
    assert "backward_ms/text" in handle.metrics()
    handle.remove()
