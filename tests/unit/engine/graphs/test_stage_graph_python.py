"""What Python decides is part of a capture: when it changes, the call is captured anew or runs eagerly."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stage_graph_cases import bench, one_thread  # noqa: F401
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from mosaic.engine.graphs import Eager

pytestmark = pytest.mark.usefixtures("one_thread")

SCALE = contextvars.ContextVar("scale", default=1.0)


class Deciding(nn.Module):
    """Computes by attributes of all kinds."""

    by = 2.0
    names = ("one",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.settings = {"gain": 1.5}
        self.parts = ["gelu"]
        self.config = SimpleNamespace(is_causal=False, inner={"bias": 0.5})
        self.act = functional.gelu
        self.tables = [torch.ones(8)]
        self.register_parameter("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.layer(x)) * self.by * self.settings["gain"] * self.tables[0] * SCALE.get()
        hidden = hidden * torch.full((8,), 0.1, device=x.device).to(x.dtype) * len(self.names)
        for _ in self.parts:
            hidden = hidden * 3 + self.config.inner["bias"]
        return -hidden if self.config.is_causal else hidden


@contextlib.contextmanager
def set_to(owner: Any, name: str, value: Any) -> Iterator[None]:
    owner = vars(owner) if not isinstance(owner, (dict, type, nn.Module)) else owner
    before = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    for to in (value, before):
        if isinstance(owner, dict):
            owner[name] = to
        else:
            setattr(owner, name, to)
        if to is value:
            yield


@contextlib.contextmanager
def context_variable(model: Deciding) -> Iterator[None]:
    token = SCALE.set(2.0)
    yield
    SCALE.reset(token)


@contextlib.contextmanager
def new_attribute(model: Deciding) -> Iterator[None]:
    model.by = 5.0
    yield
    del model.by


@contextlib.contextmanager
def longer_list(model: Deciding) -> Iterator[None]:
    model.parts.append("relu")
    yield
    model.parts.pop()


@contextlib.contextmanager
def default_dtype(model: Deciding) -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def transposed_weight(model: Deciding) -> Iterator[None]:
    model.layer.weight.data = model.layer.weight.data.T
    yield
    model.layer.weight.data = model.layer.weight.data.T


CHANGES: dict[str, Callable[[Deciding], contextlib.AbstractContextManager[None]]] = {
    "an attribute of its class": lambda model: set_to(Deciding, "by", 4.0),
    "a tuple of its class": lambda model: set_to(Deciding, "names", ("one", "two")),
    "its class's forward": lambda model: set_to(Deciding, "forward", lambda self, x: self.layer(x)),
    "an attribute that stands before its class's": new_attribute,
    "an entry of a dict": lambda model: set_to(model.settings, "gain", 0.5),
    "the length of a list": longer_list,
    "a tensor in a list": lambda model: set_to(model, "tables", [torch.zeros(8)]),
    "an object's attribute": lambda model: set_to(model.config, "is_causal", True),
    "what is in an object's attribute": lambda model: set_to(model.config.inner, "bias", 1.0),
    "a function": lambda model: set_to(model, "act", functional.relu),
    "a context variable": context_variable,
    "the default dtype": default_dtype,
    "how a weight lies": transposed_weight,
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_python_decides_by_is_seen(change: str):
    model, x = Deciding(), torch.randn(4, 8)
    with bench() as ours:
        for changed in (False, True, False, False):
            with CHANGES[change](model) if changed else contextlib.nullcontext():
                assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.refused == {}
        assert ours.graphs.num_captures in (2, 3)  # what moved is let go, and captured again when it comes back
        assert ours.graphs.num_replays == 4


@torch.no_grad()
@pytest.mark.parametrize(
    "context",
    [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        lambda: torch.backends.cudnn.flags(benchmark=True),
        lambda: torch.device("cpu"),
    ],
    ids=["kernels of attention", "their order", "tuning", "default device"],
)
def test_settings_of_torch_are_captured_apart(context: Any):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with bench() as ours:
        for changed in (False, True, False, True):
            with context() if changed else contextlib.nullcontext():
                assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_captures == 2
        assert ours.graphs.num_replays == 4


@torch.no_grad()
def test_a_hook_on_all_modules_is_called_though_it_came_after_the_capture():
    model, x, called = nn.Linear(8, 8), torch.randn(4, 8), []
    with bench() as ours:
        ours.call("tower", model, x)
        hook = nn.modules.module.register_module_forward_hook(lambda *_: called.append(1))
        try:
            ours.call("tower", model, x)
        finally:
            hook.remove()
        assert called == [1]
        assert ours.graphs.num_replays == 1


@torch.no_grad()
def test_inside_of_a_mode_of_the_user_s_nothing_is_replayed():
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2

    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with bench() as ours:
        ours.call("tower", model, x)
        with Doubling():
            (left,) = ours.graphs.run("tower", [ours.branch("tower", model, x)])
        assert isinstance(left, Eager)
        assert left.reason == "another torch mode is active"
        assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_replays == 2


@torch.no_grad()
def test_a_table_that_the_first_call_fills_does_not_keep_a_module_from_its_graph():
    class Filling(Deciding):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, float] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.known.setdefault(len(x), 1.0 / len(x))
            return self.layer(x) * self.known[len(x)]

    model, x = Filling(), torch.randn(4, 8)
    with bench() as ours:
        for _ in range(3):
            assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_replays == 2
        assert ours.graphs.refused == {}
