"""The towers, batches and the loop that most cases vary, and decorators that make a case of one function.

``towers`` takes the forward of both towers, ``between`` that of the model that calls them, ``losses`` a step's loss,
``before_step`` and ``after_step`` an action round forward and backward, ``stepping`` a whole step. ``models`` takes the
model alone. Further arguments are those of ``train``; of ``towers`` and ``between`` the others become attributes: a
module, a parameter or a value; a tensor becomes a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bench.sweep.device import moved
from bench.sweep.session import Session

Batch = tuple[torch.Tensor, ...]
Run = Callable[[Session], None]
Make = Callable[[], nn.Module]


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
    """Two towers with separate results."""

    def forward(self, x, y):
        return self.a(x), self.b(y)


def batch(step: int, rows: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return moved(tuple(torch.randn(rows, 32, generator=generator, device="cpu") for _ in range(2)))


def tokens(step: int, rows: int = 16, length: int = 10) -> Batch:
    """Returns the two sequences of tokens of a step."""
    generator = torch.Generator().manual_seed(step)
    return moved(tuple(torch.randint(0, 50, (rows, length), generator=generator) for _ in range(2)))


def squared(model: nn.Module, inputs: Batch) -> torch.Tensor:
    """Returns the mean square of a model's result."""
    return model(*inputs).float().square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-2)


def train(
    session: Session,
    model: nn.Module,
    *,
    batch: Callable[[int], Batch] = batch,
    loss: Callable[[Session, Any, Batch], torch.Tensor] = lambda session, model, inputs: squared(model, inputs),
    before: Callable[[Session, Any, int], object] = lambda session, model, step: None,
    after: Callable[[Session, Any, int], object] = lambda session, model, step: None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    steps: int = 4,
) -> None:
    """Colocates a model and trains it; ``before`` and ``after`` are called in each step, round forward and backward."""
    session.colocate(model, batch(0))
    optimize = optimizer(model)
    for step in range(steps):
        optimize.zero_grad()
        before(session, model, step)
        result = loss(session, model, batch(step))
        result.backward()
        after(session, model, step)
        optimize.step()
        session.note(result.item())


def train_step(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Trains a model that is colocated for one step."""
    optimizer.zero_grad()
    loss = squared(model, batch(step))
    loss.backward()
    optimizer.step()
    session.note(loss.item())


class Part(nn.Module):
    """A module with a function as its forward."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__()
        add_parts(self, parts or {"net": tower})


def add_parts(module: nn.Module, parts: Mapping[str, Any]) -> None:
    for name, make in parts.items():
        value = make() if callable(make) else make
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)


def alike(forward: Callable[..., Any], count: int = 2, **parts: Any) -> tuple[nn.Module, ...]:
    """Returns modules of one class; each has a tower as ``net`` unless its parts are named."""
    cls = type("Part", (Part,), {"forward": forward})
    return tuple(cls(parts) for _ in range(count))


def net(forward: Callable[..., Any], *towers: nn.Module) -> nn.Module:
    """Returns a model of two towers with a function as its forward."""
    return type("Net", (Two,), {"forward": forward})(*towers)


def loop(run: Run) -> Run:
    """Marks a case that varies the loop round the plain ``Two``; a pipeline runs that model once."""
    run.is_loop = True
    return run


def models(make: Make = Two, **training: Any) -> Run:
    def run(session: Session) -> None:
        train(session, make(), **training)

    return loop(run) if make is Two else run


def towers(**settings: Any) -> Callable[[Callable[..., Any]], Run]:
    training, parts = _divided(settings)
    return lambda forward: _of(forward, models(lambda: Two(*alike(forward, **parts)), **training))


def between(*, towers: Callable[[], tuple[nn.Module, ...]] = tuple, **settings: Any) -> Callable[..., Run]:
    training, parts = _divided(settings)
    setup = parts.pop("setup", lambda model: None)

    def case(forward: Callable[..., Any]) -> Run:
        def make() -> nn.Module:
            model = net(forward, *towers())
            add_parts(model, parts)
            setup(model)
            return model

        return _of(forward, models(make, **training))

    return case


def losses(model: Make = Two, **training: Any) -> Callable[..., Run]:
    return lambda loss: _of(loss, models(model, loss=loss, **training))


def before_step(model: Make = Two, **training: Any) -> Callable[..., Run]:
    return lambda before: _of(before, models(model, before=before, **training))


def after_step(model: Make = Two, **training: Any) -> Callable[..., Run]:
    return lambda after: _of(after, models(model, after=after, **training))


def stepping(
    model: Make = Two,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    sample: Callable[[nn.Module], Any] = lambda model: batch(0),
    steps: int = 4,
) -> Callable[[Callable[..., None]], Run]:
    def case(take: Callable[..., None]) -> Run:
        def run(session: Session) -> None:
            own = model()
            session.colocate(own, sample(own))
            optimize = optimizer(own)
            for step in range(steps):
                take(session, own, optimize, step)

        return _of(take, loop(run) if model is Two else run)

    return case


def _divided(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits arguments into those of ``train`` and the parts of a module."""
    training = {name: value for name, value in settings.items() if name in (train.__kwdefaults__ or {})}
    return training, {name: value for name, value in settings.items() if name not in training}


def _of(function: Callable[..., Any], run: Run) -> Run:
    """Makes a case a function of the file that it is written in."""
    run.__module__ = function.__module__
    return run
