"""Random numbers of samples and of micro-batches: functions of the seed and the position, on any process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType

import numpy as np
import torch
from torch import nn

from mosaic.find.random_numbers import CPU, Generator, generator_state, random_state, set_generator_state
from mosaic.retrain.worker.positions import Words, words_at, words_of

WORDS = 4
"""Random words of a sample: for torch, NumPy, Python, and the data set's own generators."""
_MAX_ITEMS = 64
"""Size of a container above which it holds data, not generators."""
_MAX_DEPTH = 4
"""Most levels of nested objects, such as transforms in a transform in a data set."""
_NO_HOLDERS = torch.Tensor | np.ndarray | type | ModuleType | FunctionType


def sample_words(seed: int, positions: Sequence[int]) -> Words:
    """Returns four random words for each position."""
    first = np.asarray(positions, dtype=np.uint64) * np.uint64(WORDS)
    return words_at(words_of("samples", seed)[0], np.add.outer(first, np.arange(WORDS, dtype=np.uint64)))


def seed_sample(words: Sequence[int], generators: Sequence[Generator] = ()) -> None:
    """Seeds this process's default generators on the host, and ``generators``, by four words of ``sample_words``.

    ``torch.manual_seed`` takes a hundred times as long because it looks for devices. torch's and NumPy's generators use
    32 bits of a seed.
    """
    torch.default_generator.manual_seed(words[0])
    np.random.seed(words[1] & 0xFFFFFFFF)
    random.seed(words[2])
    for number, generator in enumerate(generators):
        own_seed = words_of(words[3], number)[0]
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own_seed)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(own_seed).state  # type: ignore[call-arg]  # each kind takes a seed
        else:  # NumPy's legacy generators take 32 bits
            generator.seed(own_seed if isinstance(generator, random.Random) else own_seed & 0xFFFFFFFF)


@contextmanager
def put_back(generators: Sequence[Generator] = ()) -> Iterator[None]:
    """Runs the block on one torch thread; restores the thread count and the host's random states.

    A loader's worker has one thread too, and a sum over a long sample depends on it.
    """
    before = random_state(CPU)
    states = [generator_state(generator) for generator in generators]
    threads = torch.get_num_threads()
    try:
        if threads > 1:
            torch.set_num_threads(1)
        yield
    finally:
        before.restore()
        for generator, state in zip(generators, states, strict=True):
            set_generator_state(generator, state)
        if threads > 1:
            torch.set_num_threads(threads)


@contextmanager
def drawn_under(seed: int, position: int, generators: Sequence[Generator] = ()) -> Iterator[None]:
    """Seeds the block's random numbers on the host by position; restores their states afterwards."""
    with put_back(generators):
        seed_sample(sample_words(seed, [position])[0].tolist(), generators)
        yield


def seed_step(seed: int, step: int, microbatch: int, generators: Sequence[Generator] = ()) -> None:
    """Seeds all generators of a model, on all devices, and ``generators_of`` it, for one micro-batch of a step."""
    words = words_of("step", seed, step, microbatch)
    seed_sample(words, generators)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(words[0])
    elif torch.backends.cuda.is_built():
        torch.cuda.manual_seed_all(words[0])  # torch applies it at the first use


def generators_of(root: object) -> tuple[Generator, ...]:
    """Returns generators that are attributes of an object, of modules within it, or of transforms within a data set.

    Call it once: it searches attributes and short containers. It misses generators in closures, and those that a call
    constructs.
    """
    generators: dict[int, Generator] = {}
    seen: set[int] = set()
    modules = root.modules() if isinstance(root, nn.Module) else [root]
    pending = [(vars(each) if isinstance(each, nn.Module) else each, _MAX_DEPTH) for each in modules][::-1]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, Generator):
            generators[id(value)] = value
        elif depth >= 0 and id(value) not in seen and not isinstance(value, _NO_HOLDERS):
            seen.add(id(value))
            inner: Sequence[object] = ()
            if isinstance(value, dict | list | tuple):
                if len(value) <= _MAX_ITEMS:
                    inner = list(value.values()) if isinstance(value, dict) else value
            elif hasattr(value, "__dict__"):
                inner, depth = list(vars(value).values()), depth - 1
            pending += [(item, depth) for item in reversed(inner)]
    return tuple(generators.values())
