"""Modules to run: five families of kernels, sizes drawn by a seed.

Steps of a tile are those of public kernels in bfloat16: a matrix product of 128 x 256 tiles does 32 columns in 0.3 to
0.45 us on one SM, attention reads keys and values that all tiles of a head share, a norm moves 16 to 24 requests for
little arithmetic, an embedding reads single rows, and a fused optimizer or loss loads much and then computes.
"""

import random
from collections.abc import Callable

from bench.cost.chip.spec import Kernel, Work


def _matmul(draw: random.Random) -> Kernel:
    return Kernel(
        kind="matmul",
        flops=2 * 128 * 256 * 32,
        tiles=draw.randint(24, 72),
        steps=draw.randint(4, 8),
        compute_ns=draw.uniform(300, 450),
        streamed=draw.randint(3, 8),
        shared=draw.randint(8, 16),
        columns=draw.choice((4, 8, 16, 32)),
        written=draw.randint(0, 2),
        depth=draw.randint(2, 3),
        chained=draw.random() < 0.5,
    )


def _attention(draw: random.Random) -> Kernel:
    return Kernel(
        kind="attention",
        flops=4 * 128 * 64 * 32,
        tiles=draw.randint(32, 96),
        steps=draw.randint(4, 8),
        compute_ns=draw.uniform(150, 300),
        streamed=draw.randint(1, 3),
        shared=draw.randint(8, 16),
        columns=draw.choice((8, 16)),
        written=1,
        chained=True,
    )


def _norm(draw: random.Random) -> Kernel:
    return Kernel(
        tiles=draw.randint(24, 80),
        steps=4,
        compute_ns=draw.uniform(40, 120),
        streamed=draw.randint(12, 24),
        written=draw.randint(6, 16),
        depth=4,
        chained=draw.random() < 0.5,
    )


def _gather(draw: random.Random) -> Kernel:
    return Kernel(
        tiles=draw.randint(32, 64),
        steps=4,
        compute_ns=draw.uniform(30, 80),
        scattered=draw.randint(12, 24),
        table=draw.choice((1 << 13, 1 << 14, 1 << 18)),
        written=draw.randint(4, 12),
        depth=3,
    )


def _burst(draw: random.Random) -> Kernel:
    return Kernel(
        tiles=draw.randint(24, 64),
        steps=draw.randint(2, 4),
        compute_ns=draw.uniform(250, 900),
        streamed=draw.randint(24, 48),
        written=draw.randint(0, 8),
        depth=1,
    )


FAMILIES: dict[str, Callable[[random.Random], Kernel]] = {
    "matmul": _matmul,
    "attention": _attention,
    "norm": _norm,
    "gather": _gather,
    "burst": _burst,
}


def draw_work(seed: int) -> Work:
    """Return a module of three to five kernels of two or three families."""
    draw = random.Random(seed)
    names = draw.sample(sorted(FAMILIES), k=draw.randint(2, 3))
    kernels = tuple(FAMILIES[draw.choice(names)](draw) for _ in range(draw.randint(3, 5)))
    return Work(name=f"{'+'.join(sorted(names))}/{seed}", kernels=kernels)
