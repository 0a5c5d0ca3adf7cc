"""SMs that run tiles of kernels, and modules that repeat their step on SMs of their own while sharing L2 and DRAM.

Two blocks live on an SM, each with one tile at a time: a block loads `depth` steps ahead, and the SM's arithmetic
serves one step at a time. A kernel ends with its last tile (so a last wave may be thin), and the next is launched
after it. Nothing here assumes how modules share bandwidth: slowdown comes out of slices that are taken, rows that
were closed, lines that were pushed out.
"""

import gc
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from bench.cost.chip.memory import L2, Events, Load, Traffic
from bench.cost.chip.spec import REQUEST_BYTES, Chip, Kernel, Work

NUM_BLOCKS = 2
"""Blocks that live on one SM."""

JITTER = 0.05
"""Arithmetic of a step varies by as much either way."""

WARM_NS, MEASURED_NS = 25_000.0, 40_000.0
"""Time before the first kernel that counts, and the least time that counts; always whole steps."""

MIN_JOBS = 16
"""Fewer runs are not worth processes of their own."""

REGION = 1 << 20
"""Requests of one region of addresses: no kernel reads or writes as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One module's mean step, over whole steps."""

    time_ns: float
    bytes_per_ns: float
    """DRAM traffic of its own, over its own time."""
    from_dram: float
    """Requests to DRAM (read or written back) for each request to L2."""


class _Sm:
    """What the blocks of one SM share."""

    __slots__ = ("alu_free", "port_free")

    def __init__(self) -> None:
        self.alu_free = 0.0
        self.port_free = 0.0


class _Block:
    """Runs one tile after another of its module's current kernel."""

    def __init__(self, runner: "_Runner", sm: _Sm) -> None:
        self._runner, self._sm = runner, sm
        self._tile = 0
        self._issued = self._arrived = self._done = 0
        self._computing = False

    def begin(self) -> None:
        """Take the next tile of the kernel, if there is one."""
        tile = self._runner.take_tile()
        if tile is None:
            return
        self._tile, self._issued, self._arrived, self._done = tile, 0, 0, 0
        self._load()

    def _load(self) -> None:
        kernel, runner = self._runner.kernel, self._runner
        while self._issued < min(kernel.steps, self._done + runner.depth):
            step, start = self._issued, max(runner.events.now, self._sm.port_free)
            self._issued += 1
            load = Load(runner.events, self._on_arrival)
            for index, address in enumerate(runner.reads(self._tile, step)):
                runner.l2.load(address, start + index * runner.port_ns, runner.traffic, load)
            self._sm.port_free = start + kernel.loads * runner.port_ns
            load.come(start)

    def _on_arrival(self) -> None:
        self._arrived += 1
        self._compute()

    def _compute(self) -> None:
        if self._computing or self._arrived <= self._done:
            return
        runner = self._runner
        self._computing = True
        spent = runner.kernel.compute_ns / runner.chip.speed * runner.draw.uniform(1 - JITTER, 1 + JITTER)
        self._sm.alu_free = max(runner.events.now, self._sm.alu_free) + spent
        runner.events.at(self._sm.alu_free, self._on_computed)

    def _on_computed(self) -> None:
        runner, kernel = self._runner, self._runner.kernel
        self._computing = False
        for index, address in enumerate(runner.writes(self._tile, self._done)):
            runner.l2.store(address, runner.events.now + index * runner.port_ns, runner.traffic)
        self._done += 1
        if self._done == kernel.steps:
            runner.finish_tile()
            self.begin()
            return
        self._load()
        self._compute()


class _Runner:
    """One module that repeats its step on its SMs; each step reads and writes new tensors, as in training."""

    def __init__(self, chip: Chip, events: Events, l2: L2, work: Work, num_sms: int, index: int, seed: int) -> None:
        self.chip, self.events, self.l2 = chip, events, l2
        self.traffic = Traffic()
        self.draw = random.Random(seed * 101 + index)
        self.port_ns = REQUEST_BYTES / chip.sm_bytes_per_ns
        self._ended: list[tuple[float, int, int]] = []
        self._num_kernels = 0
        """Of those in `_ended`, up to the last whole step that counts; 0 while too few have ended."""
        self._work = work
        self._blocks = [_Block(self, sm) for sm in [_Sm() for _ in range(num_sms)] for _ in range(NUM_BLOCKS)]
        self._space = index << 40
        self._num_launched = 0
        self.on_measured: Callable[[], None] = lambda: None
        events.at(self.draw.uniform(0, chip.launch_ns), self._launch)

    def _region(self, num_before: int, part: int) -> int:
        """Return the first address of a region: 0 streamed, 1 weights, 2 written, of this launch or one before."""
        return self._space + (4 * (self._num_launched - num_before) + part) * REGION

    def _launch(self) -> None:
        self.kernel: Kernel = self._work.kernels[self._num_launched % len(self._work.kernels)]
        self._before = self._work.kernels[(self._num_launched - 1) % len(self._work.kernels)]
        self._num_launched += 1
        self.depth = max(1, min(self.kernel.depth, self.chip.sm_requests // (NUM_BLOCKS * max(1, self.kernel.loads))))
        self._next_tile, self._left = 0, self.kernel.tiles
        for block in self._blocks:
            block.begin()

    def take_tile(self) -> int | None:
        """Return the next tile of the kernel that nobody has begun."""
        if self._next_tile == self.kernel.tiles:
            return None
        self._next_tile += 1
        return self._next_tile - 1

    def finish_tile(self) -> None:
        """Count a tile; the last one ends the kernel and launches the next."""
        self._left -= 1
        if self._left:
            return
        if self.events.now >= WARM_NS:
            self._ended.append((self.events.now, self.traffic.dram_bytes, self.traffic.asked))
            whole = (len(self._ended) - 1) % len(self._work.kernels) == 0
            if whole and self.events.now - self._ended[0][0] >= MEASURED_NS:
                self._num_kernels = len(self._ended)
                self.on_measured()
        self.events.at(self.events.now + self.chip.launch_ns, self._launch)

    def reads(self, tile: int, step: int) -> list[int]:
        """Return what one step of a tile reads: its own data, its column's weights, random places of a table."""
        kernel, before = self.kernel, self._before
        first = (tile * kernel.steps + step) * kernel.streamed
        if kernel.chained and before.written:
            held, base = before.tiles * before.steps * before.written, self._region(1, 2)
            own = [base + index % held for index in range(first, first + kernel.streamed)]
        else:
            base = self._region(0, 0)
            own = list(range(base + first, base + first + kernel.streamed))
        weights = self._region(0, 1) + (tile % kernel.columns * kernel.steps + step) * kernel.shared
        own.extend(range(weights, weights + kernel.shared))
        own.extend(self._space - 1 - self.draw.randrange(kernel.table) for _ in range(kernel.scattered))
        return own

    def writes(self, tile: int, step: int) -> range:
        """Return the addresses that one step of a tile writes."""
        first = self._region(0, 2) + (tile * self.kernel.steps + step) * self.kernel.written
        return range(first, first + self.kernel.written)

    @property
    def is_measured(self) -> bool:
        """Whether enough whole steps have ended."""
        return self._num_kernels > 0

    def ran(self) -> Ran:
        """Return the mean of all whole steps that count."""
        start, bytes_before, asked_before = self._ended[0]
        end, num_bytes, asked = self._ended[self._num_kernels - 1]
        moved = num_bytes - bytes_before
        return Ran(
            time_ns=(end - start) * len(self._work.kernels) / (self._num_kernels - 1),
            bytes_per_ns=moved / (end - start),
            from_dram=moved / REQUEST_BYTES / max(1, asked - asked_before),
        )


def run(chip: Chip, placed: Sequence[tuple[Work, int]], *, seed: int) -> tuple[Ran, ...]:
    """Run modules side by side, each on its own SMs, until a whole step or more of each has been measured.

    All repeat their steps until the slowest is through, so that each has its neighbours all the time.

    Args:
        chip: What they run on.
        placed: Each module with the SMs it has.
        seed: Decides random rows, arithmetic's jitter and who starts first.

    Returns:
        One mean step a module.

    Raises:
        ValueError: If the modules ask for more SMs than there are.
    """
    asked = sum(num_sms for _, num_sms in placed)
    if asked > chip.num_sms or any(num_sms < 1 for _, num_sms in placed):
        raise ValueError(
            f"{asked} SMs are asked for, the chip has {chip.num_sms}; give each module one or more and no more in all"
        )
    events = Events()
    l2 = L2(chip, events)
    runners = [_Runner(chip, events, l2, work, num_sms, index, seed) for index, (work, num_sms) in enumerate(placed)]

    def check() -> None:
        if all(runner.is_measured for runner in runners):
            events.stop()  # the rest of the step is not looked at

    for runner in runners:
        runner.on_measured = check
    gc.disable()  # millions of small objects live and die, and none is in a circle
    try:
        events.run()
    finally:
        gc.enable()
    return tuple(runner.ran() for runner in runners)


def run_all(chip: Chip, jobs: Sequence[tuple[Sequence[tuple[Work, int]], int]]) -> list[tuple[Ran, ...]]:
    """Run placed modules, each with a seed, on all cores of this machine where there are many."""
    cores = len(os.sched_getaffinity(0))
    if len(jobs) < MIN_JOBS or cores == 1:
        return [run(chip, placed, seed=seed) for placed, seed in jobs]
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_run, [chip] * len(jobs), jobs, chunksize=4))


def _run(chip: Chip, job: tuple[Sequence[tuple[Work, int]], int]) -> tuple[Ran, ...]:
    placed, seed = job
    return run(chip, placed, seed=seed)
