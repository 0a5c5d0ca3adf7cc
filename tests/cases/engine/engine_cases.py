"""Models, loops and comparisons for the tests of the engine."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import mosaic
from bench.sweep.device import device, moved
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import Handle, find_modules
from mosaic.plan import Plan, plan_from_quotas
from mosaic.profiler import ProfileSettings

FAST = ProfileSettings(foreign_share=2.0, sample_seconds=0.05, min_repeats=2, max_repeats=3)

Stages = Sequence[dict[str, int]]


def tower(width_in: int = 8, width: int = 16, *extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, width), nn.GELU(), *extra, nn.Linear(width, width))


class TwoTowers(nn.Module):
    """Two encoders, glue that projects each one's output, and a head over both."""

    def __init__(self, left: nn.Module | None = None, right: nn.Module | None = None) -> None:
        super().__init__()
        self.left = left if left is not None else tower()
        self.right = right if right is not None else tower()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = nn.functional.normalize(self.left(x) @ self.weight, dim=-1)
        right = nn.functional.normalize(self.right(y), dim=-1)
        return self.scale * left @ right.T


class Glued(TwoTowers):
    """Two encoders, and between them what a function of the model and its inputs says."""

    def __init__(self, glue: Callable[..., Any], left: nn.Module | None = None, right: nn.Module | None = None) -> None:
        super().__init__(left, right)
        self.glue = glue

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.glue(self, *inputs)


class Outside:
    """An attribute whose value lies outside of the module, so that the engine cannot see that it changes."""

    def __init__(self, value: Any) -> None:
        self.first = value
        self.values: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def __get__(self, module: Any, kind: type) -> Any:
        return self.values.get(module, self.first)

    def __set__(self, module: Any, value: Any) -> None:
        self.values[module] = value


class Doing(nn.Module):
    """Layers, and a forward that a function of the module and its input says; ``is_on`` is for that to look at."""

    is_on = Outside(False)

    def __init__(self, what: Callable[..., Any], width_in: int = 8) -> None:
        super().__init__()
        self.layers = tower(width_in)
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(self, x)


def failing(self: Doing, x: torch.Tensor) -> torch.Tensor:
    """Fails half-way where ``is_on``."""
    made = self.layers(x)
    if self.is_on:
        raise ValueError("told to fail")
    return made.relu()


def pair_batch(step: int = 0, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return moved(tuple(torch.randn(rows, 8, generator=generator, device="cpu") for _ in range(2)))


def plan_for(model: nn.Module, sample: Any, stages: Stages, backend: HostBackend, **choice: Any) -> Plan:
    return plan_from_quotas(stages, graph=find_modules(model, sample, **choice).graph, device=backend.device)


def colocate(
    model: nn.Module, sample: Any, stages: Stages, *, num_slots: int = 2, one_thread: bool = False, **choice: Any
) -> Handle:
    """Colocates by a plan given by hand; ``choice`` is ``include`` and ``exclude``."""
    backend = HostBackend(num_slots=num_slots, num_threads=1 if one_thread else None)
    plan = plan_for(model, sample, stages, backend, **choice)
    named = {"modules": choice.get("include"), "exclude": choice.get("exclude", ())}
    return mosaic.colocate(model, sample=sample, plan=plan, backend=backend, **named)


@contextmanager
def colocated(model: nn.Module, sample: Any, stages: Stages, **choice: Any) -> Any:
    handle = colocate(model, sample, stages, **choice)
    try:
        yield handle
    finally:
        handle.remove()


@dataclass
class Record:
    """The results of a loop."""

    values: list[torch.Tensor] = field(default_factory=list)

    def note(self, *values: Any) -> None:
        for value in values:
            self.values.append(torch.as_tensor(value).detach().clone())

    def note_model(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        for parameter in model.parameters():
            assert type(parameter.grad) in (torch.Tensor, type(None))
            self.note(parameter, torch.zeros(0) if parameter.grad is None else parameter.grad)
        self.note(*model.buffers())
        if optimizer is not None:
            for state in optimizer.state.values():
                found = [value for value in state.values() if isinstance(value, torch.Tensor)]
                assert all(type(value) is torch.Tensor for value in found)
                self.note(*found)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{tuple(ours.shape)} {ours.dtype} is not {tuple(theirs.shape)} {theirs.dtype}"
    return f"{tuple(ours.shape)}, by up to {(ours.double() - theirs.double()).abs().max():.3g}"


Loop = Callable[[nn.Module, Record], None]


def assert_same(plain: Record, colocated: Record) -> None:
    assert len(plain.values) == len(colocated.values)
    for index, (ours, theirs) in enumerate(zip(colocated.values, plain.values, strict=True)):
        assert same_bits(ours, theirs), f"value {index} of {len(plain.values)} differs: {_difference(ours, theirs)}"


def assert_near(plain: Record, colocated: Record, *, of_largest: float = 0.0) -> None:
    """Holds loops equal on a GPU, where libraries may choose other kernels on a lane and steps amplify rounding.

    Under autocast ``of_largest`` allows for a share of a tensor's largest value: gradients of a weight that is cast
    once are summed in bfloat16, those of one that is cast at each use in float32.
    """
    assert len(plain.values) == len(colocated.values)
    for ours, theirs in zip(colocated.values, plain.values, strict=True):
        largest = float(theirs.nan_to_num().abs().max()) if of_largest and theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3 + of_largest * largest, equal_nan=True)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compares two tensors: of one type and equal; NaN equals NaN alone."""
    if ours.dtype != theirs.dtype or ours.layout != theirs.layout or ours.shape != theirs.shape:
        return False
    ours, theirs = (tensor.to_dense() if tensor.layout != torch.strided else tensor for tensor in (ours, theirs))
    return torch.equal(ours.isnan(), theirs.isnan()) and bool(((ours == theirs) | ours.isnan()).all())


def assert_on_lanes(handle: Handle) -> None:
    """Holds that calls went to lanes, unless the plan gives each module the whole device."""
    plan = handle.plan
    placed = {name for name in handle.graph.names if not plan.is_alone(name)}
    ran = {span.module for span in handle.timeline().spans if span.phase == "forward"}
    assert not placed or placed & ran, handle.describe()


def run_both(
    make: Callable[[], nn.Module],
    sample: Any,
    stages: Stages,
    loop: Loop,
    *,
    colocated: Callable[..., Any] = colocated,
    compare: Callable[[Record, Record], None] = assert_same,
    on_lanes: bool = True,
    **choice: Any,
) -> str:
    """Runs a loop on a plain and on a colocated model and compares them; returns what the handle described.

    Calls must have gone to lanes, or the comparison would prove nothing; ``on_lanes=False`` where all may run in place.
    With ``one_thread`` lanes of the host have one thread each, so that quotas of several slots compute the same bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        model = make().to(device())
        twin = copy.deepcopy(model)
        plain, ours = Record(), Record()
        torch.manual_seed(1)
        loop(model, plain)
        with colocated(twin, sample, stages, **choice) as opened:
            torch.manual_seed(1)
            loop(twin, ours)
            handle = opened if isinstance(opened, Handle) else opened[0]
            described = handle.describe()
            if on_lanes:
                assert_on_lanes(handle)
        compare(plain, ours)
        return described
    finally:
        torch.set_num_threads(threads)


def train(steps: int = 4, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Loop:
    """The simplest loop on ``pair_batch``."""

    def loop(model: nn.Module, record: Record) -> None:
        used = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05, **options)
        for step in range(steps):
            loss = model(*pair_batch(step)).square().mean()
            loss.backward()
            record.note(loss, torch.rand(1, device=device()))
            record.note_model(model, used)
            used.step()
            used.zero_grad()
        record.note_model(model, used)

    return loop


SIDE_BY_SIDE = [{"left": 1, "right": 1}]


class Trap(nn.Module):
    """A module that does what it is told."""

    order = Outside("work")

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        if self.order == "fail":
            raise ValueError("forward failed")
        if self.order == "shape":
            return hidden[:, :3]
        if self.order == "write":
            with torch.no_grad():
                self.layers[0].bias.mul_(1.0)
        if self.order == "backward":
            hidden.register_hook(fail_backward)
        return hidden.clone()


def fail_backward(grad: torch.Tensor) -> torch.Tensor:
    raise ValueError("backward failed")


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


def keeping(self: Doing, x: torch.Tensor) -> torch.Tensor:
    """Leaves a result in an attribute, for the loop."""
    hidden = self.layers(x)
    self.penalty = hidden.square().mean()
    return hidden.tanh()


def with_penalty(model: nn.Module, record: Record) -> None:
    """A loop that reads what the left tower left in its attribute."""
    for step in range(4):
        loss = model(*pair_batch(step)).square().mean() + model.left.penalty
        loss.backward()
        record.note(loss)
        record.note_model(model)


class Explicit(nn.Module):
    """Runs its branches in a parallel block, or plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = tower(), tower(8, 16, nn.Dropout(0.2)), nn.Linear(16, 4)

    def encode(self, x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        return {"hidden": self.right(x) * scale}

    def forward(self, x: torch.Tensor, y: torch.Tensor, how: str, *quotas: Any, **options: Any) -> torch.Tensor:
        if how == "plain":
            left, right = self.left(x).relu(), self.encode(y, scale=0.5)
        else:
            with mosaic.parallel(*quotas, **options) as p:
                left = p.run("left", self.left, x).relu()
                right = p.run("right", self.encode, y, scale=0.5)
        return self.head(left * right["hidden"])


def explicit_steps(model: Explicit, how: str = "plain", *quotas: Any, **options: Any) -> Record:
    """Trains five steps."""
    record = Record()
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(5):
        loss = model(*pair_batch(step), how, *quotas, **options).square().mean()
        loss.backward()
        record.note(loss)
        record.note_model(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return record
