"""The towers, batches and the loop that most cases start from, and decorators that make a case of one function.

``towers`` takes the forward of both towers, ``between`` that of the model that calls them, ``losses`` a step's loss,
``stepping`` a whole step, ``before_step`` and ``after_step`` what the loop does around forward and backward. Further
arguments of ``towers`` and ``between`` become attributes: a module, a parameter or a value; a tensor becomes a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from bench.sweep.device import moved
from bench.sweep.session import Session

Batch = tuple[torch.Tensor, ...]


def tower(*last: nn.Module) -> nn.Sequential:
    """Returns a net of 32 to 32 features."""
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32), *last)


class Two(nn.Module):
    def __init__(self, a: nn.Module | None = None, b: nn.Module | None = None) -> None:
        super().__init__()
        self.a = a if a is not None else tower()
        self.b = b if b is not None else tower()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.a(x) * self.b(y)


class Both(Two):
    """Two towers whose results stay apart."""

    def forward(self, x, y):
        return self.a(x), self.b(y)


class Scaled(nn.Module):
    """A tower that reads an attribute."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net = tower()

    def forward(self, x):
        return self.net(x) * self.scale


def batch(step: int, rows: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return moved(tuple(torch.randn(rows, 32, generator=generator, device="cpu") for _ in range(2)))


def tokens(step: int, rows: int = 16, length: int = 10) -> Batch:
    """Returns the two sequences of tokens of a step."""
    generator = torch.Generator().manual_seed(step)
    return moved(tuple(torch.randint(0, 50, (rows, length), generator=generator) for _ in range(2)))


def squared(model: nn.Module, inputs: Batch) -> torch.Tensor:
    """Returns the mean square of what a model makes."""
    return model(*inputs).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-2)


def train(
    session: Session,
    model: nn.Module,
    *,
    batch: Callable[[int], Batch] = batch,
    loss: Callable[[Any, Batch], torch.Tensor] = squared,
    before: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    steps: int = 4,
) -> None:
    """Colocates a model and trains it; ``before`` and ``after`` are called in each step, round forward and backward."""
    session.colocate(model, batch(0))
    optimize = optimizer(model)
    for step in range(steps):
        optimize.zero_grad()
        before(step)
        result = loss(model, batch(step))
        result.backward()
        after(step)
        optimize.step()
        session.note(result.item())


def train_step(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Trains a model that is colocated for one step."""
    optimizer.zero_grad()
    loss = squared(model, batch(step))
    loss.backward()
    optimizer.step()
    session.note(loss.item())


Case = Callable[[Session], None]


class Part(nn.Module):
    """A module with a function as its forward."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__()
        add_parts(self, parts)


def add_parts(module: nn.Module, parts: Mapping[str, Any]) -> None:
    for name, make in parts.items():
        value = make() if callable(make) else make
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)


def part(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """Returns a module that has a tower as ``net``, where it is not said which parts it has."""
    return type("Part", (Part,), {"forward": forward})(parts or {"net": tower})


def alike(forward: Callable[..., Any], **parts: Any) -> tuple[nn.Module, nn.Module]:
    """Returns two modules of one class."""
    cls = type("Part", (Part,), {"forward": forward})
    return cls(parts or {"net": tower}), cls(parts or {"net": tower})


def towers(*, model: type[Two] = Two, **settings: Any) -> Callable[[Callable[..., Any]], Case]:
    training, parts = _divided(settings)
    return lambda forward: _named(forward, lambda: model(*alike(forward, **parts)), training)


def between(*, towers: Callable[[], tuple[nn.Module, ...]] = tuple, **settings: Any) -> Callable[..., Case]:
    training, parts = _divided(settings)

    def case(forward: Callable[..., Any]) -> Case:
        def make() -> nn.Module:
            model = net(forward, *towers())
            add_parts(model, parts)
            return model

        return _named(forward, make, training)

    return case


def net(forward: Callable[..., Any], *towers: nn.Module) -> nn.Module:
    """Returns a model of two towers with a function as its forward."""
    return type("Net", (Two,), {"forward": forward})(*towers)


def losses(*, model: Callable[[], nn.Module] = Two, **training: Any) -> Callable[..., Case]:
    return lambda loss: _named(loss, model, training, role="loss")


def before_step(*, model: Callable[[], nn.Module] = Two, **training: Any) -> Callable[..., Case]:
    return lambda change: _named(change, model, training, role="before")


def after_step(*, model: Callable[[], nn.Module] = Two, **training: Any) -> Callable[..., Case]:
    return lambda change: _named(change, model, training, role="after")


def stepping(
    *,
    model: Callable[[], nn.Module] = Two,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    sample: Callable[[nn.Module], Any] = lambda model: batch(0),
    steps: int = 4,
) -> Callable[[Callable[..., None]], Case]:
    def case(take: Callable[..., None]) -> Case:
        @wraps(take)
        def run(session: Session) -> None:
            made = model()
            session.colocate(made, sample(made))
            optimize = optimizer(made)
            for step in range(steps):
                take(session, made, optimize, step)

        return run

    return case


_TRAINING = ("batch", "loss", "before", "after", "optimizer", "steps", "setup")


def _divided(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what ``train`` is told, and the parts of a module."""
    training = {name: value for name, value in settings.items() if name in _TRAINING}
    return training, {name: value for name, value in settings.items() if name not in _TRAINING}


def _named(function: Callable[..., Any], make: Callable[[], nn.Module], training: Mapping[str, Any], role: str = ""):
    """Returns the case of a function's name, which trains a model; the function has a role in the training."""

    @wraps(function)
    def run(session: Session) -> None:
        model, told = make(), dict(training)
        told.pop("setup", lambda model: None)(model)
        if role == "loss":
            told["loss"] = partial(function, session)
        elif role:
            told[role] = partial(function, session, model)
        for name, first in (("before", (model,)), ("after", (session, model))):
            if name in training:
                told[name] = partial(training[name], *first)
        train(session, model, **told)

    return run
