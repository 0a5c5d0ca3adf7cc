"""Random numbers of samples and of micro-batches: functions of the seed and of what is drawn, whoever draws it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType

import numpy as np
import torch
from torch import nn

from mosaic.find.random_numbers import CPU, Generator, generator_state, random_state, set_generator_state
from mosaic.train.data.permutation import Words, words_at, words_of

WORDS = 4
"""Random words of a sample: torch's, NumPy's, Python's, and one for what else is drawn."""
_MAX_ITEMS = 64
"""Of a container, beyond which it holds data and no generators."""
_MAX_DEPTH = 4
"""Of objects within objects, such as a list of transforms within a transform within a data set."""

_NOT_SEARCHED = (torch.Tensor, np.ndarray, type, ModuleType, FunctionType)


def sample_words(seed: int, positions: Sequence[int]) -> Words:
    """Returns four random words for each position."""
    return words_at(words_of("samples", seed)[0], np.asarray(positions, dtype=np.uint64), WORDS)


def seed_sample(words: Sequence[int], generators: Sequence[Generator] = ()) -> None:
    """Seeds this process's default generators on the host, and those given.

    ``torch.manual_seed`` takes a hundred times as long, for it looks for devices. torch's and NumPy's generators use 32
    bits of a seed.

    Args:
        words: Four, such as ``sample_words`` returns.
        generators: Of a data set.
    """
    torch.default_generator.manual_seed(words[0])
    np.random.seed(words[1] & 0xFFFFFFFF)
    random.seed(words[2])
    _seed_each(generators, words[3])


@contextmanager
def put_back(generators: Sequence[Generator] = ()) -> Iterator[None]:
    """Puts random states of the host back on leaving, and torch's number of threads, which is 1 within.

    A worker of a loader has one thread too: a sum over a long sample depends on it.
    """
    before = random_state(CPU)
    own = [generator_state(generator) for generator in generators]
    threads = torch.get_num_threads()
    try:
        if threads > 1:
            torch.set_num_threads(1)
        yield
    finally:
        before.restore()
        for generator, state in zip(generators, own, strict=True):
            set_generator_state(generator, state)
        if threads > 1:
            torch.set_num_threads(threads)


@contextmanager
def drawn_under(seed: int, position: int, generators: Sequence[Generator] = ()) -> Iterator[None]:
    """Within the block, random numbers are those of this position; afterwards they are as before.

    A device's random numbers are not touched.
    """
    with put_back(generators):
        seed_sample(sample_words(seed, [position])[0].tolist(), generators)
        yield


def seed_step(seed: int, step: int, microbatch: int, generators: Sequence[Generator] = ()) -> None:
    """Seeds everything that a model draws from, on all devices, for the training on one micro-batch.

    Args:
        seed: Of the run.
        step: Optimizer steps taken before this one.
        microbatch: Index among those of the global batch, whichever rank trains on it.
        generators: The model's own, from ``generators_of``.
    """
    words = words_of("step", seed, step, microbatch)
    seed_sample(words, generators)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(words[0])
    elif torch.backends.cuda.is_built():
        torch.cuda.manual_seed_all(words[0])  # is remembered for the first use


def generators_of(root: object) -> tuple[Generator, ...]:
    """Returns generators that are attributes of an object, of modules within it, or of transforms within a data set.

    To be called once: it looks through attributes and short containers. One that is made anew for each call, or is
    hidden in a closure, is not found.
    """
    found: dict[int, Generator] = {}
    seen: set[int] = set()
    modules = list(root.modules()) if isinstance(root, nn.Module) else [root]
    for module in modules:
        _collect(vars(module) if isinstance(module, nn.Module) else module, _MAX_DEPTH, found, seen)
    return tuple(found.values())


def _collect(value: object, depth: int, found: dict[int, Generator], seen: set[int]) -> None:
    if isinstance(value, Generator):
        found[id(value)] = value
        return
    if (
        depth < 0
        or id(value) in seen
        or isinstance(value, torch.Tensor | np.ndarray | type | ModuleType | FunctionType)
    ):
        return
    seen.add(id(value))
    inner: Sequence[object] = ()
    if isinstance(value, dict | list | tuple):
        if len(value) <= _MAX_ITEMS:
            inner = list(value.values()) if isinstance(value, dict) else value
    elif hasattr(value, "__dict__"):
        inner, depth = list(vars(value).values()), depth - 1
    for one in inner:
        _collect(one, depth, found, seen)


def _seed_each(generators: Sequence[Generator], word: int) -> None:
    for number, generator in enumerate(generators):
        own = words_of(word, number)[0]
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state  # type: ignore[call-arg]  # each kind takes a seed
        elif isinstance(generator, random.Random):
            generator.seed(own)
        else:
            generator.seed(own & 0xFFFFFFFF)
