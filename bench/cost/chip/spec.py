"""The simulated chip and the modules that run on it, in figures from public sources.

An eighth of an H100 SXM: 16 of its 132 SMs (one a slot, as a Hopper GPU has 16 slots of 8), 10 of its 80 HBM3
channels, 10 of its 80 L2 slices. Whatever SMs share is cut by eight with them, so the ratios are the GPU's. Sources:

* Accel-Sim's tuned H100 (github.com/gpgpu-sim/gpgpu-sim_distribution, configs/tested-cfgs/SM90_H100): 1.98 GHz, 2 L2
  slices at each of 40 memory partitions, 80 x 256 sets x 20 ways x 128 B of L2, 237 cycles to L2 and 194 more to
  DRAM, 512 misses of 128 B in flight an SM, 16 banks a channel, first-ready scheduling, 3000 cycles to launch a
  kernel.
* NVIDIA's H100 data sheet: 3.35 TB/s; Chips and Cheese, "Nvidia's H100: Funny L2, and Tons of Bandwidth": 5.5 to 5.7
  TB/s from L2.
* DRAMsim3 (github.com/umd-memsys/DRAMsim3, configs/HBM*.ini): rows open in 14 ns and close in 14 ns, 48 ns from one
  to the next of a bank.

The unit of memory is one warp's load of 16 bytes a lane: a request of 512 bytes. Steps of a tile are those of public
kernels in bfloat16: a matrix product of 128 x 256 tiles does 32 columns in 0.3 to 0.45 us on one SM, attention reads
keys and values that all tiles of a head share, a norm moves 16 to 24 requests for little arithmetic, an embedding
reads single rows, and a fused optimizer or loss loads much and then computes (a burst).
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

REQUEST_BYTES = 512
"""Bytes of one request: 32 lanes of 16 bytes."""

ROW_REQUESTS = 4
"""Neighbouring requests that lie in one row of one bank: 2 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What runs kernels: SMs, slices of L2 with a channel of DRAM behind each."""

    num_sms: int = 16
    num_channels: int = 10
    """Channels of DRAM; each stands behind one slice of L2."""
    dram_bytes_per_ns: float = 418.75
    """Peak of all channels together."""
    l2_bytes_per_ns: float = 700.0
    """Peak of all slices together."""
    l2_bytes: int = 80 * 256 * 20 * 128 // 8
    sm_bytes_per_ns: float = 64 * 1.98
    """What one SM can ask for."""
    sm_requests: int = 512 * 128 // REQUEST_BYTES
    """Requests that one SM may have in flight."""
    l2_ns: float = 237 / 1.98
    """From an SM to L2 and back, without waiting."""
    dram_ns: float = 194 / 1.98
    """More for a miss, besides the bank's and the bus's time."""
    num_banks: int = 16
    open_ns: float = 14.0
    close_ns: float = 14.0
    row_cycle_ns: float = 48.0
    activate_gap_ns: float = 4.0
    """Between two activations of one channel."""
    turn_ns: float = 8.0
    """Lost when the bus turns from reads to writes or back."""
    launch_ns: float = 3000 / 1.98
    """Between the end of a kernel and the start of the next."""
    speed: float = 1.0
    """Arithmetic against an H100's SM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel: equal tiles, each a loop of steps that load, compute and write."""

    tiles: int
    steps: int
    """Steps of one tile."""
    compute_ns: float
    """Arithmetic of one step on one H100 SM."""
    kind: str = "memory"
    """Matmul, attention or memory, as counting would call it."""
    flops: int = 0
    """Operations of one step, as counting would see them; the chip goes by ``compute_ns`` alone."""
    streamed: int = 0
    """Requests a step for data that only this tile reads."""
    shared: int = 0
    """Requests a step for data that tiles of one column read (weights)."""
    columns: int = 1
    """Columns of tiles, each with weights of its own."""
    scattered: int = 0
    """Requests a step at random places of a table."""
    table: int = 1
    """Requests that the table has."""
    written: int = 0
    """Requests a step that write."""
    chained: bool = False
    """Whether what is streamed is what the kernel before wrote, which L2 may still hold."""
    depth: int = 2
    """Steps loaded ahead of the arithmetic; 1: load, then compute."""

    @property
    def loads(self) -> int:
        """Requests of one step that read."""
        return self.streamed + self.shared + self.scattered


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A module's step: kernels, one after the other."""

    name: str
    kernels: tuple[Kernel, ...]

    def on_share(self, degree: int) -> "Work":
        """The same module on one of `degree` devices: its part of the tiles, all of its weights."""
        kernels = tuple(replace(kernel, tiles=max(1, -(-kernel.tiles // degree))) for kernel in self.kernels)
        return replace(self, kernels=kernels)


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "matmul": {
        "kind": "matmul",
        "flops": 2 * 128 * 256 * 32,
        "tiles": (24, 72),
        "steps": (4, 8),
        "compute_ns": (300.0, 450.0),
        "streamed": (3, 8),
        "shared": (8, 16),
        "columns": [4, 8, 16, 32],
        "written": (0, 2),
        "depth": (2, 3),
        "chained": [False, True],
    },
    "attention": {
        "kind": "attention",
        "flops": 4 * 128 * 64 * 32,
        "tiles": (32, 96),
        "steps": (4, 8),
        "compute_ns": (150.0, 300.0),
        "streamed": (1, 3),
        "shared": (8, 16),
        "columns": [8, 16],
        "written": 1,
        "chained": True,
    },
    "norm": {
        "tiles": (24, 80),
        "steps": 4,
        "compute_ns": (40.0, 120.0),
        "streamed": (12, 24),
        "written": (6, 16),
        "depth": 4,
        "chained": [False, True],
    },
    "gather": {
        "tiles": (32, 64),
        "steps": 4,
        "compute_ns": (30.0, 80.0),
        "scattered": (12, 24),
        "table": [1 << 13, 1 << 14, 1 << 18],
        "written": (4, 12),
        "depth": 3,
    },
    "burst": {
        "tiles": (24, 64),
        "steps": (2, 4),
        "compute_ns": (250.0, 900.0),
        "streamed": (24, 48),
        "written": (0, 8),
        "depth": 1,
    },
}
"""Kernels by family: what is drawn evenly from a range (a pair), one of a list, or a constant."""


def draw_work(seed: int) -> Work:
    """Return a module of three to five kernels of two or three families."""
    dice = random.Random(seed)
    names = dice.sample(sorted(FAMILIES), k=dice.randint(2, 3))
    kernels = tuple(_draw_kernel(dice.choice(names), dice) for _ in range(dice.randint(3, 5)))
    return Work(name=f"{'+'.join(sorted(names))}/{seed}", kernels=kernels)


def _draw_kernel(family: str, dice: random.Random) -> Kernel:
    def draw(of: Any) -> Any:
        if isinstance(of, tuple):
            return dice.randint(*of) if isinstance(of[0], int) else dice.uniform(*of)
        return dice.choice(of) if isinstance(of, list) else of

    return Kernel(**{name: draw(of) for name, of in FAMILIES[family].items()})
