"""``colocate`` leaves no trace of having run a model, however it ends and whatever the model's forward does."""

from __future__ import annotations

import itertools
import random
import signal
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import FAST, tower
from engine_cases import Doing as Reading
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.errors import UnsupportedModelError
from mosaic.plan import plan_from_quotas
from mosaic.profiler.measuring import measure as measuring
from mosaic.profiler.preserve import memory
from mosaic.profiler.preserve import model as preserving

BACKEND = HostBackend(num_slots=2)
TOWERS = ["left", "right"]


class Log:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.total = 0
        self.lines: list[Any] = [[1], {"a": 2}]


class Slotted:
    """The same with slots."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


CALLS, TABLE, SCALE = 0, {"rows": [1]}, torch.ones(2)


def enclosing() -> type[nn.Module]:
    """Returns a class whose methods share variables, as those do that are made in a function or a notebook's cell."""
    calls, table, scale, dice = 0, {"rows": [1]}, torch.ones(2), torch.Generator()

    class Counting(nn.Module):
        def forward(self) -> None:
            nonlocal calls
            calls += 1
            table["rows"].append(calls)
            scale.mul_(2)
            torch.rand(2, generator=dice)

        @staticmethod
        def shown() -> Any:
            return calls, str(table), scale.tolist(), dice.get_state().tolist()

    return Counting


def globals_shown() -> Any:
    return CALLS, str(TABLE), SCALE.tolist()


class Restless(nn.Module):
    """Two towers and all that a forward may change; what it does change is up to ``doings``."""

    calls = 0
    table: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, doings: list[Doing]) -> None:
        super().__init__()
        self.doings = doings
        self.left, self.right = tower(), tower(8, 16, nn.BatchNorm1d(16))
        self.teacher, self.words, self.spare = nn.Linear(8, 8), nn.Embedding(4, 8, max_norm=0.1), nn.Dropout()
        self.teacher.requires_grad_(False)
        self.norm, self.counting = nn.BatchNorm1d(8), enclosing()()
        self.alone = nn.Parameter(torch.randn(3))
        self.register_buffer("held", torch.randn(2, 3))
        self.register_buffer("wide", torch.zeros(1, 1).expand(4, 4))
        self.queue, self.hidden = torch.randn(5, 2), [nn.Linear(2, 2)]
        self.log, self.slotted = Log(), Slotted()
        self.count, self.seen, self.cache = 0, [1, [2]], OrderedDict(a=torch.zeros(2), b=1)
        self.last, self.names = deque([1, 2], maxlen=2), {"a"}
        self.generator, self.dice, self.array = torch.Generator(), random.Random(3), np.zeros(3)
        self.numpy_dice, self.old_dice = np.random.default_rng(1), np.random.RandomState(1)
        for parameter in self.left.parameters():
            parameter.grad = torch.randn_like(parameter)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for do in self.doings:
                do(self, x)
        return self.left(x) @ self.right(y).T


Doing = Callable[[Restless, torch.Tensor], Any]


def swap(model: Restless, x: torch.Tensor) -> None:
    model.teacher.weight.data = model.teacher.weight.data * 0.9


def write_by_numpy(model: Restless, x: torch.Tensor) -> None:
    model.teacher.weight.detach().numpy()[0] += 1


def replace_tensors(model: Restless, x: torch.Tensor) -> None:
    model.alone = nn.Parameter(torch.randn(7))
    model.held = model.held * 2
    model.queue = model.queue.clone()


def replace_parts(model: Restless, x: torch.Tensor) -> None:
    model.spare = nn.Identity()
    model.added = nn.Linear(2, 2)
    if hasattr(model.log, "total"):
        del model.log.total


def keep_numbers(model: Restless, x: torch.Tensor) -> None:
    model.count += 1
    model.log.total = getattr(model.log, "total", 0) + 1
    model.slotted.total += 1
    Restless.calls += 1
    Restless.table[len(Restless.table)] = 1
    model.teacher.weight.note = "seen"


def keep_things(model: Restless, x: torch.Tensor) -> None:
    model.seen.insert(0, x)
    model.seen[-1].append(3)
    model.cache["c"] = x.detach()
    model.cache["a"].add_(1)
    model.cache.move_to_end("a")
    model.last.append(3)
    model.names.add("b")
    model.log.lines[0].append(2)
    model.log.lines[1]["a"] = 3
    model.array[0] += 1


def change_modes(model: Restless, x: torch.Tensor) -> None:
    model.eval()
    model.words.requires_grad_(not model.words.weight.requires_grad)
    model.left.register_forward_hook(lambda *_: None)


def set_globals(model: Restless, x: torch.Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(2)
    torch.set_anomaly_enabled(True, False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cudnn.benchmark = True


def set_thread(model: Restless, x: torch.Tensor) -> None:
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)


def write_globals(model: Restless, x: torch.Tensor) -> None:
    global CALLS, ADDED
    CALLS += 1
    ADDED = x
    add_to_table()


def add_to_table() -> None:
    TABLE["rows"].append(CALLS)
    SCALE.mul_(2)


def set_newer_settings(model: Restless, x: torch.Tensor) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


DOINGS: dict[str, Doing] = {
    "in place": lambda model, x: [q.mul_(0.9) for q in model.teacher.parameters()],
    "by data": lambda model, x: model.teacher.weight.data.mul_(0.9).add_(model.alone.mean()),
    "for each": lambda model, x: torch._foreach_mul_(list(model.teacher.parameters()), 0.9),
    "of a view": lambda model, x: model.teacher.weight[1].zero_(),
    "as out": lambda model, x: torch.mul(model.teacher.bias, 2, out=model.teacher.bias),
    "by numpy": write_by_numpy,
    "swapped": swap,
    "transposed": lambda model, x: model.teacher.weight.t_(),
    "renormed": lambda model, x: model.words(torch.tensor([1, 2])),
    "buffers": lambda model, x: (model.held.mul_(2), model.norm(x)),
    "plain tensors": lambda model, x: (model.queue.mul_(2), model.hidden[0].weight.mul_(2)),
    "the batch": lambda model, x: x.mul_(0.5),
    "replaced tensors": replace_tensors,
    "replaced parts": replace_parts,
    "numbers": keep_numbers,
    "things": keep_things,
    "modes": change_modes,
    "global settings": set_globals,
    "newer settings": set_newer_settings,
    "settings of the thread": set_thread,
    "what methods enclose": lambda model, x: model.counting(),
    "globals": write_globals,
    "draws": lambda model, x: (torch.rand(3), random.random(), np.random.rand()),
    "own draws": lambda model, x: (torch.rand(3, generator=model.generator), model.dice.random()),
    "numpy's own draws": lambda model, x: (model.numpy_dice.random(), model.old_dice.rand()),
}


def seen_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields what a value is, down to the bits of its tensors and the identity of its objects."""
    if isinstance(value, (int, float, str, bytes, type(None), type)):
        yield path, value
        return
    yield path, (id(value), type(value))
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Generator):
        yield f"{path} state", value.get_state().tolist()
    elif isinstance(value, random.Random):
        yield f"{path} state", value.getstate()
    elif isinstance(value, (np.random.Generator, np.random.RandomState)):
        yield f"{path} state", repr(value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state())
    elif isinstance(value, set):
        yield f"{path} content", sorted(value)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield f"{path} values", value.tolist()
    elif isinstance(value, dict):
        yield f"{path} keys", list(value)
        for key, item in value.items():
            yield from seen_in(item, f"{path}.{key}", seen)
    elif isinstance(value, (list, tuple, deque)):
        yield f"{path} length", len(value)
        for index, item in enumerate(value):
            yield from seen_in(item, f"{path}[{index}]", seen)
    elif isinstance(value, Slotted):
        yield f"{path} total", value.total
    if isinstance(value, torch.Tensor):
        yield f"{path} place", (value.data_ptr(), value.stride(), value.dtype, value.requires_grad)
        yield from seen_in(value.grad, f"{path} gradient", seen)
    if isinstance(value, (nn.Module, torch.Tensor, Log)):
        yield from seen_in(vars(value), path, seen)


def state_of(model: Restless, batch: Any) -> dict[str, Any]:
    seen: set[int] = set()
    return {
        **dict(seen_in(model, "model", seen)),
        **dict(seen_in(batch, "batch", seen)),
        "type": type(model),
        "enclosed": model.counting.shown(),
        "globals": (globals_shown(), "ADDED" in globals()),
        "calls": Restless.calls,
        "table": Restless.table.copy(),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "Python's": random.getstate(),
        "numpy's": repr(np.random.get_state()),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.mkldnn.conv.fp32_precision),
        "anomaly": torch.is_anomaly_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "attention": torch.backends.cuda.flash_sdp_enabled(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cuda"),
        "autocast's dtype": torch.get_autocast_dtype("cpu"),
        "autocast's cache": torch.is_autocast_cache_enabled(),
    }


@contextmanager
def no_trace(model: Restless, batch: Any) -> Iterator[None]:
    before = state_of(model, batch)
    yield
    after = state_of(model, batch)
    changed = {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}
    assert not changed


def made(names: list[str]) -> tuple[Restless, list[torch.Tensor]]:
    torch.manual_seed(0)
    return Restless([DOINGS[name] for name in names]), [torch.randn(6, 8), torch.randn(6, 8)]


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small models are copied whole, of large ones what is written."""
    if request.param == "large":
        monkeypatch.setattr(preserving, "MAX_COPIED_BYTES", 0)
        monkeypatch.setattr(preserving, "MAX_COPIED_UNWATCHED_BYTES", 0)
        monkeypatch.setattr(memory, "MAX_SMALL_BYTES", 0)
    return str(request.param)


def doings_of(size: str) -> list[str]:
    """All; what writes through numpy is seen too late for a copy of a large model."""
    return [name for name in DOINGS if size == "small" or name != "by numpy"]


@contextmanager
def raising(error: type[BaseException], at: int) -> Iterator[None]:
    """Raises after one of all calls of modules."""
    calls = itertools.count(1)

    def count(*_: Any) -> None:
        if next(calls) == at:
            raise error("told to")

    hook = register_module_forward_hook(count)
    try:
        yield
    finally:
        hook.remove()
        assert next(calls) > at


def by_plan(model: nn.Module, batch: Any) -> mosaic.Handle:
    finding = find_modules(model, batch, include=TOWERS)
    plan = plan_from_quotas([dict.fromkeys(finding.graph.names, 1)], graph=finding.graph, device=BACKEND.device)
    return mosaic.colocate(model, sample=batch, plan=plan, backend=BACKEND, modules=TOWERS)


def by_profile(model: nn.Module, batch: Any) -> mosaic.Handle:
    options = mosaic.Options(cache=None, profiling=FAST, trial=None)
    return mosaic.colocate(model, sample=batch, backend=BACKEND, modules=TOWERS, options=options)


class Within(nn.Module):
    """Does all of it inside of a module, and so on a lane's thread while that is profiled."""

    def __init__(self, model: Restless) -> None:
        super().__init__()
        self.model = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (model,) = self.model
        with torch.no_grad():
            for do in model.doings:
                if do not in (set_globals, set_newer_settings, set_thread):
                    do(model, torch.zeros(6, 8, dtype=torch.float32))
        return x * 1


@pytest.mark.parametrize("name", DOINGS)
def test_what_a_forward_does_is_undone(name: str):
    model, batch = made([name])
    with no_trace(model, batch):
        by_plan(model, batch).remove()


def test_all_of_it_together_is_undone(size: str):
    model, batch = made(doings_of(size))
    with no_trace(model, batch):
        by_plan(model, batch).remove()


def test_profiling_is_undone(size: str):
    model, batch = made(doings_of(size))
    model.left.append(Within(model))
    with no_trace(model, batch):
        handle = by_profile(model, batch)
        assert handle.profile is not None
        handle.remove()


def test_a_module_that_is_profiled_finds_the_attributes_that_the_model_leaves_it():
    def leaving(model: Restless, x: torch.Tensor) -> None:
        model.left.scale = x.mean()
        model.left.scales.append(1)

    model, batch = made([])
    model.left = Reading(lambda self, x: self.layers(x) * self.scale * self.scales[0])
    model.left.scales = []
    model.doings = [leaving]
    with no_trace(model, batch):
        handle = by_profile(model, batch)
        assert "left" in handle.graph.names
        assert [s.infeasible for s in handle.profile.samples if s.module == "left"].count(None) >= 2
        handle.remove()


def test_falling_back_on_a_busy_machine_is_undone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measuring, "ForeignLoad", lambda: SimpleNamespace(share=5.0))
    model, batch = made(doings_of("large"))
    model.left.append(Within(model))
    with no_trace(model, batch):
        assert "the model runs as it was" in by_profile(model, batch).describe()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 4, 9, 15, 30, 60, 90])
def test_a_call_that_raises_is_undone(at: int, error: type[BaseException]):
    model, batch = made(doings_of("large"))
    with no_trace(model, batch), raising(error, at):
        if error is ValueError and at > 20:  # a module that fails at one quota is measured at others
            by_profile(model, batch).remove()
        else:
            with pytest.raises(error, match="told to"):
                by_profile(model, batch)


def test_a_model_that_is_refused_is_as_it_was(size: str):
    model, batch = made(doings_of(size))
    with no_trace(model, batch), pytest.raises(UnsupportedModelError, match="called 0 times"):
        mosaic.colocate(model, sample=batch, modules=["alone_not_called", "spare"], backend=BACKEND)


def test_a_function_that_runs_the_model_is_undone_with_what_it_encloses():
    model, batch = made(["the batch", "in place"])
    seen: list[int] = []

    def run() -> None:
        seen.append(1)
        model(*batch)

    with no_trace(model, batch):
        find_modules(model, run)
    assert seen == []


def test_an_optimizer_that_steps_in_backward_does_not_while_modules_are_profiled():
    model, batch = made([])
    steps: list[torch.Tensor] = []
    for parameter in model.left.parameters():
        parameter.register_post_accumulate_grad_hook(steps.append)
    with no_trace(model, batch):
        by_profile(model, batch).remove()
    assert steps == []
    model(*batch).sum().backward()
    assert len(steps) == 4


def test_an_interrupt_while_things_are_put_back_waits_until_they_are(monkeypatch: pytest.MonkeyPatch):
    model, batch = made(doings_of("small"))
    steps_back = preserving.Memory.steps_back

    def interrupted(self: Any) -> Iterator[Any]:
        signal.raise_signal(signal.SIGINT)
        return steps_back(self)

    monkeypatch.setattr(preserving.Memory, "steps_back", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with no_trace(model, batch), pytest.raises(KeyboardInterrupt):
            find_modules(model, batch)
    finally:
        signal.signal(signal.SIGINT, before)


def now_and_then(model: Restless, x: torch.Tensor) -> None:
    model.count += 1
    if model.count == 5:
        model.teacher.weight.add_(1)


def test_a_write_that_no_run_showed_is_refused_with_the_tensor_and_the_remedy(size: str):
    model, batch = made([])
    model.doings = [now_and_then]
    model.left.append(Within(model))
    if size == "small":
        with no_trace(model, batch):
            by_profile(model, batch).remove()
    else:
        with pytest.raises(UnsupportedModelError, match=r"teacher\.weight: its values were changed .*exclude="):
            by_profile(model, batch)


def test_an_iterator_that_went_on_is_refused_by_name():
    model, batch = made([])
    model.numbers = itertools.count()
    model.doings = [lambda model, x: next(model.numbers)]
    with pytest.raises(UnsupportedModelError, match="numbers: the count went on and cannot go back; keep a number"):
        find_modules(model, batch)


def test_a_model_without_shapes_is_refused_before_it_runs():
    model, batch = made([])
    model.lazy = nn.LazyLinear(3)
    with pytest.raises(UnsupportedModelError, match=r"lazy\.weight has no shape yet; call the model once before"):
        find_modules(model, batch)
