"""The position stream: the n-th sample of a day is a function of the seed, the frozen sources, and n.

The order of a whole day is computed at once. Every pass over a source has each row once, in an order of its own, and
the samples of a source are spread evenly over the day. The state of a run is therefore one integer, the number of
positions consumed. Random numbers of samples and micro-batches are functions of the seed and the position, too.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mosaic.find.random_numbers import CPU, Generator, generator_state, random_state, set_generator_state

MAX_REPEATS = 4
"""Most draws of a replayed row per draw of a new one."""
Words = NDArray[np.uint64]
_MAX_ITEMS = 64
"""Size of a container above which it holds data, not generators."""
_MAX_DEPTH = 4
"""Most levels of nested objects, such as transforms in a transform in a data set."""
_NO_HOLDERS = torch.Tensor | np.ndarray | type | ModuleType | FunctionType


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    """Such as ``new 2026-11-22``."""
    rows: int
    samples: int


class PositionStream:
    """The samples of a day, in order.

    Attributes:
        source: Index of the source of each position.
        row: Row of each position, within its source.
    """

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        for each in sources:
            if each.rows < 1 or each.samples < 1:
                raise ValueError(f"source {each.name!r} has rows={each.rows}, samples={each.samples}; both must be > 0")
        self.sources = tuple(sources)
        self.seed = seed
        # Sample k of a source with n falls at a random place within the k-th of n equal parts of the day.
        places = []
        for each in sources:
            index = np.arange(each.samples, dtype=np.uint64)
            words = words_at(words_of("order", seed, each.name)[0], index)
            places.append((index + (words >> np.uint64(11)) * 2.0**-53) / each.samples)
        order = np.argsort(np.concatenate(places), kind="stable")
        self.source = np.repeat(np.arange(len(sources)), [each.samples for each in sources])[order]
        self.row = np.concatenate([_rows(each, seed) for each in sources])[order]


def _rows(source: Source, seed: int) -> NDArray[np.int64]:
    """Returns the rows of a source, pass after pass; the last pass may be cut."""
    passes = -(-source.samples // source.rows)
    key = words_of("rows", seed, source.name)[0]
    words = words_at(key, np.arange(passes * source.rows, dtype=np.uint64)).reshape(passes, source.rows)
    return np.argsort(words, axis=1, kind="stable").ravel()[: source.samples]


def replayed_share(new: Mapping[str, int], replay: Mapping[str, int], share: float) -> float:
    """Returns the share of replayed samples, which is smaller than ``share`` if few rows would repeat too often."""
    often = MAX_REPEATS * sum(replay.values()) / sum(new.values())
    return min(share, often / (1 + often))


def samples_of(new: Mapping[str, int], replay: Mapping[str, int], share: float, total: int) -> dict[str, int]:
    """Splits a day's samples over folders by their rows: every new row comes equally often, and every replayed one.

    ``new``, not without rows, and ``replay`` count the rows of each folder; ``share`` is the wanted part of ``replay``.
    """
    replayed = round(total * replayed_share(new, replay, share))
    return {**_split(new, total - replayed), **_split(replay, replayed)}


def _split(rows: Mapping[str, int], samples: int) -> dict[str, int]:
    """Splits samples by rows, by the largest remainders."""
    total = max(1, sum(rows.values()))
    split = {name: samples * count // total for name, count in rows.items()}
    largest_first = sorted(rows, key=lambda name: -(samples * rows[name] % total))
    for name in largest_first[: samples - sum(split.values())]:
        split[name] += 1
    return split


# Random words in integer arithmetic. NumPy promises the streams of its bit generators and not the results of
# ``permutation``, and the order of a day must survive an update of NumPy.

_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2 to the power of 64 over the golden ratio, the increment of SplitMix64 (Steele et al., OOPSLA 2014)."""


def words_of(*names: object) -> tuple[int, int, int, int]:
    """Returns four random words of 64 bits that depend on all names."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=32).digest()
    return struct.unpack("<4Q", digest)  # type: ignore[return-value]  # four of them


def words_at(key: int, indices: Words) -> Words:
    """Returns a random word for each index, by SplitMix64."""
    words: Words = np.array(key, dtype=np.uint64) + indices * _STEP
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


# Generators, seeded by such words.


def sample_words(seed: int, positions: Sequence[int]) -> Words:
    """Returns four random words for each position: for torch, NumPy, Python, and the data set's own generators."""
    first = np.asarray(positions, dtype=np.uint64) * np.uint64(4)
    return words_at(words_of("samples", seed)[0], np.add.outer(first, np.arange(4, dtype=np.uint64)))


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
