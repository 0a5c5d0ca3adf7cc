"""What a module reads besides its arguments, on streams: as in the plain loop, and no launch unordered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_cases import Glued, Record, TwoTowers, keeping, pair_batch, tower
from hidden_state_cases import CASES, EAGER, doing, product, run_on_streams, train
from torch import nn


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
@pytest.mark.parametrize("shown", [False, True], ids=["only in the loop", "in the sample"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_done_around_a_call_is_seen_by_the_call(case: str, shown: bool, graphs: bool):
    def make() -> Glued:
        model = CASES[case]()
        model.is_on, model.step = shown, 0
        return model

    run_on_streams(make, train, graphs=graphs, captured=case not in EAGER)


# What is done to the model between its calls, or kept of them.


def with_feature(frozen: bool) -> tuple[Callable[[], nn.Module], Any]:
    kept: dict[str, torch.Tensor] = {}

    def make() -> nn.Module:
        model = Glued(product, tower(8, 16, nn.GELU()))
        model.left.requires_grad_(not frozen)
        model.left[2].register_forward_hook(Keeping(kept))
        return model

    return make, partial(train, loss_of=lambda model, _: kept.pop("feature").square().mean())


class Keeping:
    """A hook that keeps what a layer returned."""

    def __init__(self, kept: dict[str, torch.Tensor]) -> None:
        self.kept = kept

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> None:
        self.kept["feature"] = result

    def __deepcopy__(self, _: Any) -> Keeping:
        return self


def penalty(model: Any, _: torch.Tensor) -> torch.Tensor:
    return model.left.penalty + model.right.penalty  # type: ignore[no-any-return]


def moved_to(dtype: torch.dtype) -> Any:
    def loop(model: Any, record: Record) -> None:
        for step in range(4):
            if step == 2:
                model.to(dtype)
            loss = model(*pair_batch(step)).float().square().mean()
            loss.backward()
            record.note(loss)
            record.note_model(model)
            model.zero_grad()

    return loop


def embedding() -> nn.Module:
    towers = [nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16)) for _ in range(2)]
    return Glued(lambda self, x, y: self.left(x.argsort(1)) * self.right(y.argsort(1)), *towers)


def stepping_in_backward(model: Any, record: Record) -> None:
    def step_with(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(step_with, torch.optim.SGD([parameter], lr=0.1)))
        for parameter in model.parameters()
    ]
    for step in range(4):
        loss = model(*pair_batch(step)).square().mean()
        loss.backward()
        record.note(loss)
        record.note_model(model)
    for hook in hooks:
        hook.remove()


def averaging_after_the_step(model: Any, record: Record) -> None:
    pairs = list(zip(model.right.parameters(), model.left.parameters(), strict=True))
    for step in range(4):
        loss = model(*pair_batch(step)).square().mean()
        loss.backward()
        for slow, fast in pairs:
            fast.data.sub_(fast.grad, alpha=0.1)
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        record.note(loss)
        record.note_model(model)
        model.zero_grad()


def loading_between(model: Any, record: Record) -> None:
    states = [{key: value + step for key, value in model.state_dict().items()} for step in range(4)]
    for step, state in enumerate(states):
        model.load_state_dict(state, assign=step == 2)
        loss = model(*pair_batch(step)).square().mean()
        loss.backward()
        record.note(loss)
        record.note_model(model)
        model.zero_grad()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a hook's feature is in the loss": with_feature(frozen=False),
    "a frozen tower's is": with_feature(frozen=True),
    "what a module left in an attribute is": (doing(keeping, product), partial(train, loss_of=penalty)),
    "the model moves to bfloat16": (embedding, moved_to(torch.bfloat16)),
    "the model moves to double": (embedding, moved_to(torch.float64)),
    "the optimizer steps in backward": (TwoTowers, stepping_in_backward),
    "weights are averaged after the step": (TwoTowers, averaging_after_the_step),
    "states are loaded between steps": (TwoTowers, loading_between),
}


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
@pytest.mark.parametrize("case", LOOPS)
def test_what_is_done_between_the_model_s_calls_is_seen_and_ordered(case: str, graphs: bool):
    run_on_streams(*LOOPS[case], graphs=graphs, captured="feature" not in case and " is" not in case[-3:])
