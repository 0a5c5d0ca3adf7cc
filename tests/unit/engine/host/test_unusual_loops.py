"""Loops that once differed from the plain loop or raised: equal, in place, or refused by name."""

from __future__ import annotations

import io
import itertools
import logging
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, Record, TwoTowers, colocated, pair_batch, run_both, tower, train
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mosaic.errors import UnforeseenError

NOISE, GATE = {"by": 0.0}, threading.Event()


NORMAL: dict[str, Any] = {
    "named": torch.randn_like,
    "from a distribution": lambda x: torch.distributions.Normal(torch.zeros_like(x), 1.0).rsample(),
    "of a gamma": lambda x: torch.distributions.Beta(x.exp(), x.exp()).sample(),
    "an operator": lambda x: torch.ops.aten.randn_like.default(x),
    "from a table": lambda x: NORMAL["named"](x),
}


def jitter(x: torch.Tensor, by: float, how: str) -> torch.Tensor:
    if threading.current_thread() is not threading.main_thread():
        assert GATE.wait(60)  # until the caller has drawn
    return x + by * NORMAL[how](x) if by else x


@pytest.mark.parametrize(("where", "how"), [("settings", "named"), *(("a global", how) for how in NORMAL)])
def test_draws_that_begin_in_a_later_step_come_in_the_plain_order(where: str, how: str):
    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        GATE.clear()
        left, scale = model.left(x), torch.rand(())
        GATE.set()
        return left * model.right(y) * scale

    def loop(model: Any, record: Record) -> None:
        for step in range(6):
            (NOISE if where == "a global" else vars(model.left.settings))["by"] = 0.1 * (step // 2)
            record.note(model(*pair_batch(step)), torch.rand(()))

    left = Doing(lambda self, x: jitter(jitter(self.layers(x), NOISE["by"], how), self.settings.by, how))
    left.settings = SimpleNamespace(by=0.0)
    run_both(lambda: Glued(glue, left), pair_batch(), SIDE_BY_SIDE, loop)


def test_attention_on_its_fast_path_stays_there_beside_random_numbers():
    def noisy(self: Doing, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.attention(x[:, None])[:, 0]) + torch.rand(())

    left = Doing(noisy)
    left.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    run_both(lambda: TwoTowers(left), pair_batch(), SIDE_BY_SIDE, train())
    torch.set_default_device("cpu")
    try:
        run_both(lambda: TwoTowers(left), pair_batch(), SIDE_BY_SIDE, train(), on_lanes=False)
    finally:
        torch.set_default_device(None)


def silent(self: Doing, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return self.layers(x)


class Counted(Doing):
    count = 0

    def forward(self, *inputs: Any) -> Any:
        type(self).count += 1
        return super(self.__class__, self).forward(*inputs)


def test_modules_leave_the_filters_of_warnings_and_their_own_classes_as_the_plain_loop_does():
    def loop(model: nn.Module, record: Record) -> None:
        Counted.count = 0
        for step in range(4):
            record.note(model(*pair_batch(step)), len(warnings.filters), Counted.count)

    said = run_both(lambda: TwoTowers(Doing(silent), Counted(silent)), pair_batch(), SIDE_BY_SIDE, loop, on_lanes=False)
    assert "left ran in place" in said


class Shelf:
    def __init__(self) -> None:
        self.lock, self.local = threading.RLock(), threading.local()


SHELF, ALTERNATING = Shelf(), itertools.cycle([1.0, 2.0])


def under_lock(self: Doing, x: torch.Tensor) -> torch.Tensor:
    with SHELF.lock:
        return self.layers(x) * getattr(SHELF.local, "scale", 1.0)


def counting(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return self.layers(x) * next(ALTERNATING)


def seeding(self: Doing, x: torch.Tensor) -> torch.Tensor:
    state = np.random.get_state()
    np.random.seed(0)
    result = self.layers(x) * np.random.rand()
    np.random.set_state(state)
    return result


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (under_lock, "holds a lock"),
        (counting, "holds an iterator"),
        (seeding, "which changes the whole process for a while"),
    ],
)
def test_what_threads_share_within_objects_or_change_for_a_while_keeps_modules_in_place(what: Any, said: str):
    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        SHELF.local.scale = 2.0
        with SHELF.lock:
            return model.left(x) * model.right(y)

    described = run_both(
        lambda: Glued(glue, Doing(what), Doing(what)), pair_batch(), SIDE_BY_SIDE, train(), on_lanes=False
    )
    assert said in described


@pytest.mark.parametrize("how", ["a hook", "retain_grad", "autograd.grad"])
@pytest.mark.parametrize("is_module", [True, False])
def test_a_feature_that_the_model_returns_has_the_gradient_of_all_its_uses(how: str, is_module: bool):
    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> Any:
        left = model.left(x)
        return (model.middle(left) if is_module else left.tanh()) * model.right(y), left

    def make() -> Glued:
        model = Glued(glue)
        if is_module:
            model.middle = tower(16, 16)
        return model

    def loop(model: nn.Module, record: Record) -> None:
        for step in range(4):
            model.zero_grad()
            product, feature = model(*pair_batch(step))
            feature.register_hook(lambda grad: grad * 0.1) if how == "a hook" else None
            feature.retain_grad() if how == "retain_grad" else None
            loss = product.square().mean()
            if how == "autograd.grad":
                record.note(torch.autograd.grad(loss, feature, retain_graph=True)[0])
            loss.backward()
            record.note(*([feature.grad] if how == "retain_grad" else []))
            record.note_model(model)

    run_both(make, pair_batch(), [*SIDE_BY_SIDE, {"middle": 1}] if is_module else SIDE_BY_SIDE, loop)


def test_a_key_that_a_module_adds_to_its_argument_for_some_batches_is_there():
    def adding(self: Doing, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if batch["x"][0, 0] > 0:
            batch["seen"] = batch["x"]
        return self.layers(batch["x"])

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> Any:
        batch = {"x": x}
        result = model.left(batch) * model.right(y)
        return result, str(sorted(batch))

    def loop(model: nn.Module, record: Record) -> None:
        for step in range(6):
            result, keys = model(*pair_batch(step))
            result.sum().backward()
            record.note(result, len(keys))

    run_both(lambda: Glued(glue, Doing(adding)), pair_batch(), SIDE_BY_SIDE, loop)


def test_a_tensor_that_is_logged_is_awaited_before_a_handler_locks():
    log = logging.getLogger("loop")
    log.addHandler(handler := logging.StreamHandler(io.StringIO()))

    def logging_too(self: Doing, x: torch.Tensor) -> torch.Tensor:
        log.warning("a tower")
        return self.layers(x)

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = model.left(x), model.right(y)
        log.warning("norms %s", left.norm())
        return left * right

    run_both(lambda: Glued(glue, Doing(logging_too)), pair_batch(), SIDE_BY_SIDE, train())
    log.removeHandler(handler)


class Frozen(Glued):
    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "__class__"
        super().__setattr__(name, value)


def test_a_model_that_is_compiled_later_or_refuses_attributes_runs_on_its_lanes():
    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model.left(x) * model.right(y)

    model = Frozen(glue)
    expected = model(*pair_batch())
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            assert torch.equal(compiled(*pair_batch()), expected)


def test_threads_of_a_module_s_own_may_read_its_parameters():
    def threaded(self: Doing, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: self.layers(x)).result(60)

    run_both(lambda: TwoTowers(Doing(threaded)), pair_batch(), SIDE_BY_SIDE, train())


def test_numbers_among_results_are_of_the_plain_loop_s_types():
    def counting(self: Doing, x: torch.Tensor) -> Any:
        return self.layers(x), 1 if x[0, 0] > 0 else True

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> Any:
        (left, number), right = model.left(x), model.right(y)
        return left * right, str(number)

    def loop(model: nn.Module, record: Record) -> None:
        for step in range(5):
            hidden, said = model(*pair_batch(step))
            hidden.square().mean().backward()
            record.note(hidden, len(said))

    run_both(lambda: Glued(glue, Doing(counting)), pair_batch(), SIDE_BY_SIDE, loop)


def test_a_module_that_writes_its_parameters_runs_in_place():
    right = Doing(lambda self, x: self.layers(self.table((x[:, 0].abs() * 3).long().clamp(max=8))))
    right.table = nn.Embedding(9, 8, max_norm=0.5)
    assert "right ran in place" in run_both(lambda: TwoTowers(right=right), pair_batch(), SIDE_BY_SIDE, train())


@pytest.mark.parametrize("disabled", [(), (False, True, False), (True, False, True)])
def test_calls_of_one_step_sum_their_gradients_in_the_plain_order(disabled: tuple[bool, ...]):
    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = model.left(x) * model.right(y)
        return left + model.left(y).cos() if getattr(model, "is_twice", False) else left

    def steps(model: Any, handle: Any = None) -> list[torch.Tensor]:
        record = Record()
        for step in range(5):
            losses, model.is_twice = [], step % 2 == 1 and not disabled
            for number, plainly in enumerate(disabled or (False,)):
                with handle.disabled() if handle is not None and plainly else nullcontext():
                    losses.append(model(*pair_batch(3 * step + number)).square().mean())
            sum(losses).backward()
            record.note_model(model)
        return record.values

    model, twin = (Glued(glue, Doing(lambda self, x: self.layers[2](self.layers(x).tanh()))) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    with colocated(twin, pair_batch(), SIDE_BY_SIDE, one_thread=True) as handle:
        assert all(map(torch.equal, steps(twin, handle), steps(model)))


@pytest.mark.parametrize("is_caught_inside", [True, False])
def test_after_an_error_on_a_lane_random_numbers_are_the_plain_loop_s(is_caught_inside: bool):
    def picky(self: Doing, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 10:
            raise ValueError("out of range")
        return nn.functional.dropout(self.layers(x))

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        try:
            return model.left(x) * model.right(y)
        except ValueError:
            return model.right(y) if is_caught_inside else model.left(x)

    def loop(model: nn.Module, record: Record) -> None:
        for step in range(5):
            x, y = pair_batch(step)
            with pytest.raises(ValueError, match="out of") if step > 1 and not is_caught_inside else nullcontext():
                record.note(model(x * 100 if step > 1 else x, y))
            record.note(torch.rand(()))

    run_both(lambda: Glued(glue, Doing(picky), Doing(picky)), pair_batch(), SIDE_BY_SIDE, loop)


@pytest.mark.parametrize("writes", [False, True])
def test_a_repeated_call_has_its_arguments_as_they_were_or_is_an_error(writes: bool):
    def glue(model: Glued, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"].mul_(2) if writes else batch.pop("x")
        return model.left(x).sum() + model.right(batch["y"]).sum()

    def loop(model: nn.Module, record: Record) -> None:
        for step in range(4):
            record.note(model(dict(zip("xy", pair_batch(step), strict=True))))

    ragged, sample = Doing(lambda self, x: self.layers(x)[x[:, 0] > 0]), dict(zip("xy", pair_batch(), strict=True))
    with pytest.raises(UnforeseenError) if writes else nullcontext():
        run_both(lambda: Glued(glue, ragged), (sample,), SIDE_BY_SIDE, loop)


def test_a_mode_around_the_backward_sees_the_operators_of_all_modules():
    def loop(model: nn.Module, record: Record) -> None:
        for step in range(3):
            loss, counter = model(*pair_batch(step)).square().mean(), FlopCounterMode(display=False)
            with counter:
                loss.backward()
            record.note(counter.get_total_flops())

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng])
def test_a_generator_that_two_modules_share_is_drawn_from_in_the_plain_order(make: Any):
    def noisy(self: Doing, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.generators[0].normalvariate(1.0, 0.1)

    def normal(self: Doing, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * float(self.generators[0].normal(1.0, 0.1))

    def model() -> TwoTowers:
        what = noisy if make is random.Random else normal
        towers, generator = TwoTowers(Doing(what), Doing(what)), make(3)
        towers.left.generators = towers.right.generators = [generator]
        return towers

    assert "ran in place" in run_both(model, pair_batch(), SIDE_BY_SIDE, train(), on_lanes=False)


def test_a_repeated_call_draws_from_the_model_s_own_generators_once():
    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model.left(x).sum() * model.generator.random() + model.right(y).sum()

    def model() -> Glued:
        glued = Glued(glue, Doing(lambda self, x: self.layers(x)[x[:, 0] > 0]))
        glued.generator = np.random.default_rng(3)
        return glued

    assert "its results depend on values" in run_both(model, pair_batch(), SIDE_BY_SIDE, train())


@pytest.mark.parametrize("where", ["backward", "autograd.grad"])
def test_a_backward_inside_of_autocast_casts_as_in_the_plain_loop(where: str):
    def island(self: Doing, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layers(x.float())

    def loop(model: Any, record: Record) -> None:
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*pair_batch(step)).square().mean()
                if where == "backward":
                    loss.backward()
                    record.note_model(model)
                else:
                    record.note(*torch.autograd.grad(loss, list(model.parameters())))

    run_both(lambda: TwoTowers(Doing(island), Doing(island)), pair_batch(), SIDE_BY_SIDE, loop)


class Recomputing(torch.autograd.Function):
    """Activation checkpointing by hand; helpers keep the state of random numbers."""

    @staticmethod
    def forward(ctx: Any, layers: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.layers, ctx.kept = layers, {"weights": weights, "state": torch.get_rng_state()}
        ctx.save_for_backward(x)
        return layers(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.kept["state"])
            result = ctx.layers(x)
        return None, *torch.autograd.grad(result, (x, *ctx.kept["weights"]), grad)


def test_recomputation_by_hand_drops_what_the_forward_dropped():
    def recomputing(self: Doing, x: torch.Tensor) -> torch.Tensor:
        return Recomputing.apply(self.layers, x * 1.0, *self.layers.parameters())

    def model() -> TwoTowers:
        towers = TwoTowers(Doing(recomputing), Doing(recomputing))
        for each in (towers.left, towers.right):
            each.layers.append(nn.Dropout(0.5))
        return towers

    assert "activation checkpointing" in run_both(model, pair_batch(), SIDE_BY_SIDE, train(), on_lanes=False)


def test_a_module_that_leaves_gradient_mode_switched_runs_in_place():
    def switching(on: bool) -> Doing:
        return Doing(lambda self, x: (torch.set_grad_enabled(on), self.layers(x))[1])

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = model.left(x) * model.weight.mean()
        return left * model.right(y)

    def model() -> Glued:
        return Glued(glue, switching(False), switching(True))

    assert "gradient mode" in run_both(model, pair_batch(), SIDE_BY_SIDE, train(), on_lanes=False)


def test_graphs_that_are_always_retained_and_weights_that_are_lent_do_not_keep_modules_in_place():
    def loop(model: Any, record: Record) -> None:
        for step in range(5):
            loss = model(*pair_batch(step)).square().mean()
            loss.backward(retain_graph=True)
            record.note_model(model)
            halved = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
            with torch.no_grad():
                record.note(torch.func.functional_call(model, halved, pair_batch(step)))

    assert "in place" not in run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch reads as it compiles
def test_code_that_is_compiled_out_of_sight_gets_computed_tensors():
    hidden = [torch.compile(lambda x: x.tanh() * 2, backend="eager")]

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return hidden[0](model.left(x)) * model.right(y)

    assert "code that torch compiles" in run_both(lambda: Glued(glue), pair_batch(), SIDE_BY_SIDE, train())
