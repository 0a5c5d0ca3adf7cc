"""The simulated chip and the work that runs on it, in figures from public sources.

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

The unit of memory is one warp's load of 16 bytes a lane: a request of 512 bytes.
"""

from dataclasses import dataclass, replace

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
