"""Models that read, write or decide by more than their modules' arguments, and how they are run on fake streams."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, Record, TwoTowers, assert_same, keeping, pair_batch, tower
from stream_cases import colocated, run_both
from torch import nn

from bench.sweep.device import device
from mosaic.backends.base import Backend

Glue = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Following(nn.Module):
    """Keeps statistics of what it returns, and reads a buffer and an attribute."""

    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("center", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.layers(x) - self.center) * self.scale
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return hidden


GLOBAL = {"scale": 1.0}


def of_global(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return self.layers(x) * GLOBAL["scale"]


class Skipping(nn.Module):
    """Skips its dropout by value, and draws from Python's and numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if x[0, 0] > 0:
            hidden = self.dropout(hidden)
        return self.last(hidden) * (random.random() + np.random.rand())


# What the model does around its modules' calls where ``is_on``.


def attribute_around(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.left.scale = 2.0 if self.is_on else 1.0
    left = self.left(x)
    self.left.scale = 1.0
    return left * self.right(y)


def global_around(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    GLOBAL["scale"] = 2.0 if self.is_on else 1.0
    left = self.left(x)
    GLOBAL["scale"] = 1.0
    return left * self.right(y)


def class_around(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    Following.scale = 2.0 if self.is_on else 1.0
    left = self.left(x)
    Following.scale = 1.0
    return left * self.right(y)


def result_in_an_attribute(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    right = self.right(y)
    self.left.scale = right.mean() * 3 if self.is_on else 1.0
    left: torch.Tensor = self.left(x)
    self.left.scale = 1.0
    return left + right.mean()


def inside_of(context: Callable[[bool], contextlib.AbstractContextManager[Any]]) -> Glue:
    def glue(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with context(self.is_on):
            left = self.left(x)
        return left.float() * self.right(y)

    return glue


def autocast(on: bool) -> torch.autocast:
    return torch.autocast(device().type, torch.bfloat16, enabled=on)


def product(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.left(x) * self.right(y)


def scheduled_dropout(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.left[2].p = 0.5 - 0.25 * (self.step % 3) if self.is_on else 0.5
    return self.left(x) * self.right(y)


def buffer_written_before(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if self.is_on:
        self.left.center.mul_(0.5).add_(y.mean())
    return self.left(x) * self.right(y)


def buffer_replaced_before(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if self.is_on:
        self.left.center = self.left.center * 0.5 + y.mean()
    return self.left(x) * self.right(y)


def averaged(slow: Sequence[torch.Tensor], fast: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for one, other in zip(slow, fast, strict=True):
            one.mul_(0.9).add_(other, alpha=0.1)


def replaced(slow: Sequence[torch.Tensor], fast: Sequence[torch.Tensor]) -> None:
    for one, other in zip(slow, fast, strict=True):
        one.data = one.data * 0.9 + other.data * 0.1


COUNTED = [averaged, replaced]
"""A way to write to weights that torch counts, and one that moves them."""


def teacher(update: Any, when: str) -> Glued:
    """A frozen tower whose weights follow the other's, by a list that was collected beforehand."""

    def glue(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.is_on and when == "before":
            update(*weights)
        with torch.no_grad():
            target = self.right(y)
        if self.is_on and when == "between":
            update(*weights)
        found = self.left(x)
        if self.is_on and when == "after":
            update(*weights)
        return found - target

    model = Glued(glue)
    model.right.requires_grad_(False)
    weights = list(model.right.parameters()), list(model.left.parameters())
    model.is_on = False

    def copied_with_a_list_of_its_own(_: Any) -> Glued:
        twin = teacher(update, when).to(device())
        twin.is_on = model.is_on
        return twin

    model.__dict__["__deepcopy__"] = copied_with_a_list_of_its_own
    return model


def following(glue: Glue) -> Callable[[], Glued]:
    return lambda: Glued(glue, Following(), Following())


def doing(what: Callable[..., Any], glue: Glue) -> Callable[[], Glued]:
    return lambda: Glued(glue, Doing(what), Doing(what))


def train(model: Any, record: Record, loss_of: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
    """Trains from a state of its own: a sample's run may have written to the model."""
    random.seed(1)
    np.random.seed(1)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.2 + 0.1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for model.step in range(4):
        model.is_on = model.step != 1
        out = model(*pair_batch(model.step))
        loss = out.float().square().mean() + (0 if loss_of is None else loss_of(model, out))
        loss.backward()
        record.note(loss)
        record.note_model(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


CASES: dict[str, Callable[[], Glued]] = {
    "an attribute is set around the call": following(attribute_around),
    "a global is": doing(of_global, global_around),
    "an attribute is another module's result": following(result_in_an_attribute),
    "autocast around one call": lambda: Glued(inside_of(autocast)),
    "a branch on values, and others' random numbers": lambda: Glued(product, Skipping(), Skipping()),
    "a dropout's rate is scheduled": lambda: Glued(scheduled_dropout, tower(8, 16, nn.Dropout(0.5))),
    "a buffer is written before the call": following(buffer_written_before),
    "a buffer is replaced before the call": following(buffer_replaced_before),
    **{f"weights are {update.__name__} before the call": partial(teacher, update, "before") for update in COUNTED},
    "an attribute of a class is set around the call": following(class_around),
}


EAGER = {"a branch on values, and others' random numbers"}
"""Cases that are never captured."""


# What is done to the model between its calls, or kept of them.


def with_feature() -> tuple[Callable[[], nn.Module], Any]:
    kept: dict[str, torch.Tensor] = {}

    def make() -> nn.Module:
        model = Glued(product, tower(8, 16, nn.GELU()))
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


def loading_between(model: Any, record: Record) -> None:
    states = [{key: value + step for key, value in model.state_dict().items()} for step in range(4)]
    for step, state in enumerate(states):
        model.load_state_dict(state, assign=step == 2)
        loss = model(*pair_batch(step)).square().mean()
        loss.backward()
        record.note(loss)
        record.note_model(model)
        model.zero_grad()


BETWEEN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a hook's feature is in the loss": with_feature(),
    "what a module left in an attribute is": (doing(keeping, product), partial(train, loss_of=penalty)),
    "the optimizer steps in backward": (TwoTowers, stepping_in_backward),
    "states are loaded between steps": (TwoTowers, loading_between),
}


def held_back(case: str) -> bool:
    """Returns True for cases of ``BETWEEN`` that keep something of their modules, which graphs do not capture."""
    return "feature" in case or case.endswith(" is") or is_hooked(case)


def is_hooked(case: str) -> bool:
    """Returns True for cases of ``BETWEEN`` with hooks on parameters, which run in place."""
    return "in backward" in case


def shown(case: str, in_sample: bool) -> Glued:
    """Makes the model of a case of ``CASES``."""
    model = CASES[case]()
    model.is_on, model.step = in_sample, 0
    return model


def run_on_streams(
    make: Callable[[], nn.Module],
    loop: Any,
    *,
    graphs: bool,
    captured: bool = True,
    in_place: bool = False,
    hooked: bool = False,
    backend: Backend | None = None,
    compare: Callable[[Record, Record], None] = assert_same,
) -> str:
    """Holds a loop on streams equal to the plain one, and sees that it ran on lanes, as graphs where it can."""
    opened: list[Any] = []

    @contextlib.contextmanager
    def noting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with colocated(*args, **kwargs, backend=backend) as found:
            opened.append(found[0]._executor)
            yield found

    described = run_both(
        make,
        pair_batch(),
        SIDE_BY_SIDE,
        loop,
        colocated=noting,
        compare=compare,
        graphs=graphs,
        include=["left", "right"],
        on_lanes=not hooked,
    )
    (executor,) = opened
    assert executor._num_launched > 0 or hooked
    assert in_place or hooked or not executor.in_place
    assert not (graphs and captured) or executor.graphs.num_replays > 0, executor.notes
    return described
