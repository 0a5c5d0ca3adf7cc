"""States of random generators: captured, compared, restored, forked for a block, and replaced for a thread."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
CPU = torch.device("cpu")
_STATE_WORDS, _LONGEST_SEARCH = 624, 200_000_000
_WORDS_END = 24 + 8 * _STATE_WORDS  # bytes; behind them a state keeps the second of a pair of normal numbers


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """States of default generators at one moment; ``restore`` leaves those that it does not have as they are."""

    torch: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()  # with their generators, the CPU's first
    python: Any = None
    numpy: Any = None

    def restore(self) -> None:
        for generator, state in self.torch:
            generator.set_state(state)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def is_same(self, other: RandomState) -> bool:
        """Returns whether nothing was drawn between two captures of the same generators."""
        own, its = [(each.python, each.numpy and (each.numpy[1].tobytes(), each.numpy[2:])) for each in (self, other)]
        return own == its and all(torch.equal(a[1], b[1]) for a, b in zip(self.torch, other.torch, strict=True))


def random_state(device: torch.device | None = None) -> RandomState:
    """Captures torch's, Python's and numpy's generators; of GPUs that of ``device`` alone, or None for all in use."""
    return replace(python_state(), torch=torch_state(device).torch)


def torch_state(device: torch.device | None = None) -> RandomState:
    """Captures torch's generators alone, which takes a twentieth of the time of ``random_state``."""
    generators = [torch.default_generator]
    if device is None:
        generators += torch.cuda.default_generators
    elif device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return RandomState(tuple((generator, generator.get_state()) for generator in generators))


def python_state() -> RandomState:
    return RandomState((), random.getstate(), np.random.get_state())


@contextmanager
def forked(device: torch.device | None = None, *, python: bool = True) -> Iterator[None]:
    """Restores the generators of ``random_state`` at the end of the block; without ``python`` torch's alone."""
    before = random_state(device) if python else torch_state(device)
    try:
        yield
    finally:
        before.restore()


def generator_state(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def count_draws(start: RandomState, end: RandomState) -> int | None:
    """Counts the 32-bit draws of the CPU's generator between two states; None where draws alone do not explain them."""
    before, after = start.torch[0][1], end.torch[0][1]
    if not all(torch.equal(before[part], after[part]) for part in (slice(8), slice(_WORDS_END, None))):
        return None  # it was seeded, or half of a pair of normal numbers was kept for later
    places = [int(state[16:24].view(torch.int64)) for state in (before, after)]  # within a block of the twister
    generator, count = torch.Generator(), (places[1] - places[0]) % _STATE_WORDS
    generator.set_state(before)
    advance(generator, count)
    while count < _LONGEST_SEARCH:
        if torch.equal(generator.get_state(), after):
            return count
        advance(generator, _STATE_WORDS)
        count += _STATE_WORDS
    return None


def advance(generator: torch.Generator, draws: int) -> None:
    """Draws 32-bit numbers from a generator of the CPU and drops them."""
    torch.empty(draws // 2, dtype=torch.int64).random_(generator=generator)  # two draws each, and faster
    torch.empty(draws % 2, dtype=torch.int32).random_(generator=generator)


_DRAWS = re.compile(
    r"(feature_)?(alpha_)?dropout(\dd)?_?|rand(n|int|perm)?(_like)?|random_|(\w+_)?(uniform|normal)_?|bernoulli_?|binomial"
    r"|multinomial|poisson|(cauchy|exponential|geometric)_?|gumbel_softmax|rrelu\w*|_standard_gamma|_sample_dirichlet"
    r"|fractional_max_pool\dd\w*|(svd|pca)_lowrank|lobpcg"
)
_DROPS = re.compile(r"scaled_dot_product_attention|multi_head_attention_forward|gru|lstm|rnn_(tanh|relu)")
"""Functions that draw where one of their arguments is a share to drop."""


class LaneRandomness(TorchFunctionMode):
    """Makes functions of this thread draw from a lane's generator; watching all operators would take a fifth longer."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws, kwargs = _may_draw(func), kwargs or {}
        if draws == "drops":
            draws = any(isinstance(each, float) and each > 0 for each in (*args, *kwargs.values()))
        with _DrawingOperators(self._generator) if draws else nullcontext():
            return func(*args, **kwargs)


@lru_cache(maxsize=4096)
def _may_draw(func: Any) -> bool | Literal["drops"]:
    name = getattr(func, "__name__", "").partition(".")[0]  # an operator's ends with that of its overload
    return "drops" if _DROPS.fullmatch(name) else _DRAWS.fullmatch(name) is not None


class _DrawingOperators(TorchDispatchMode):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws_numbers(func) and kwargs.get("generator") is None and (overload := with_generator(func)) is not None:
            return overload(*args, **{**kwargs, "generator": self._generator})
        return func(*args, **kwargs)


@cache
def draws_numbers(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or "generator" in dict(_arguments(func))


@cache
def with_generator(func: Any) -> Any:
    """Returns the overload of an operator that takes a generator and otherwise the same arguments, or None."""
    plain = _arguments(func)
    overloads = [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]
    generator = ("generator", "Optional[Generator]")
    return next((each for each in overloads if {*plain, generator} == {*_arguments(each)}), None)


def _arguments(func: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]


def runs_own_code(module: nn.Module) -> bool:
    """Returns whether a module has other code than torch's, whose modules draw in all calls of a kind or in none."""
    for part in module.modules():
        kind: Any = getattr(type(part), "_mosaic_plain", type(part))
        named = (kind, *part._forward_hooks.values(), *part._forward_pre_hooks.values(), *vars(part).values())
        if any((getattr(each, "__module__", None) or "torch").partition(".")[0] != "torch" for each in named):
            return True
    return False
