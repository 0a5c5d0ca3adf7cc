"""A model that writes to everything that a forward can reach, and what is compared before and after."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from engine_cases import FAST, tower
from torch import nn

import mosaic
from bench.sweep.device import device, moved
from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.plan import plan_from_quotas

BACKEND = HostBackend(num_slots=2)
TOWERS = ["left", "right"]


class Log:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.total = 0
        self.lines: list[Any] = [[1], {"a": 2}]


class Restless(nn.Module):
    """Two towers and all that a forward may change; what it does change is up to ``doings``."""

    def __init__(self, doings: list[Doing]) -> None:
        super().__init__()
        self.doings = doings
        self.left, self.right = tower(), tower(8, 16, nn.BatchNorm1d(16))
        self.teacher, self.words, self.spare = nn.Linear(8, 8), nn.Embedding(4, 8, max_norm=0.1), nn.Dropout()
        self.teacher.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.alone = nn.Parameter(torch.randn(3))
        self.register_buffer("held", torch.randn(2, 3))
        self.register_buffer("wide", torch.zeros(1, 1).expand(4, 4))
        self.queue, self.hidden = torch.randn(5, 2), [nn.Linear(2, 2)]
        self.log = Log()
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
    model.alone = nn.Parameter(torch.randn(7, device=x.device))
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
    "renormed": lambda model, x: model.words(torch.tensor([1, 2], device=x.device)),
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
    "draws": lambda model, x: (torch.rand(3), torch.rand(3, device=x.device), random.random(), np.random.rand()),
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
        "torch's random numbers": torch.get_rng_state().tolist(),
        "the device's": torch.cuda.get_rng_state().tolist() if device().type == "cuda" else None,
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
    return Restless([DOINGS[name] for name in names]).to(device()), moved([torch.randn(6, 8), torch.randn(6, 8)])


def by_plan(model: nn.Module, batch: Any, backend: Backend = BACKEND) -> mosaic.Handle:
    finding = find_modules(model, batch, include=TOWERS)
    plan = plan_from_quotas([dict.fromkeys(finding.graph.names, 1)], graph=finding.graph, device=backend.device)
    return mosaic.colocate(model, sample=batch, plan=plan, backend=backend, modules=TOWERS)


def by_profile(model: nn.Module, batch: Any, backend: Backend = BACKEND) -> mosaic.Handle:
    options = mosaic.Options(cache=None, profiling=FAST, trial=None)
    return mosaic.colocate(model, sample=batch, backend=backend, modules=TOWERS, options=options)
