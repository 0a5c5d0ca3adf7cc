"""Variants of one training loop against the plain one, in rounds in which the two take turns."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from bench.gpu.bench import Bench
from bench.gpu.models.variants import Step, Workload
from bench.gpu.tables import MAX_LOSS_DIFFERENCE
from bench.record import Figure, median_figure, missing_figure

WARM_STEPS = 5
"""Steps before anything counts: libraries choose their kernels, and stages are captured after a few calls."""
ROUND_S = 0.06
ROUNDS = 7
MIN_ROUNDS = 2


class Rounds:
    """Measures pieces of work in order of worth, none of which takes more than its share of the time that is left.

    Args:
        work: The loop.
        bench: Where.
        worth: By name, every piece that may be measured, in order, and its share of what the ones from it on have.

    Attributes:
        plain_ms: The median of the plain step.
        speedup: By variant, the median over plain steps taken in turn; of those alone whose losses are right.
    """

    def __init__(self, work: Workload, bench: Bench, worth: Mapping[str, float]) -> None:
        self.work = work
        self.bench = bench
        self.plain_ms = 0.0
        self.speedup: dict[str, float] = {}
        self._worth = dict(worth)
        self._plain: list[float] = []
        self._steps = 1

    def share_s(self, name: str) -> float:
        """Returns the seconds that a piece may take: its share of what is left for it and all after it."""
        names = list(self._worth)
        later = sum(self._worth[other] for other in names[names.index(name) :])
        return self.bench.budget.left_s * self._worth[name] / later

    def measure_plain(self) -> Iterator[Figure]:
        """Yields the plain step, against which everything is measured."""
        work, bench = self.work, self.bench
        work.step()  # the optimizer makes its state
        self._plain = work.losses(work.step)
        times = [time_ms(work.step, bench, 1) for _ in range(3)]
        self._steps = 1 if bench.dry_run else max(1, round(ROUND_S * 1e3 / statistics.median(times)))
        samples = [time_ms(work.step, bench, self._steps) for _ in range(3)]
        self.plain_ms = statistics.median(samples)
        yield median_figure("step_ms", samples, labels={"variant": "plain"})
        yield from self._peak({"variant": "plain"})

    def measure(
        self,
        name: str,
        opened: Callable[[], AbstractContextManager[tuple[Step, Step]]],
        labels: dict[str, str] | None = None,
        *,
        captures: bool = False,
    ) -> Iterator[Figure]:
        """Yields time, speed-up, difference of losses and memory of a variant, or the reason why there are none.

        Args:
            name: The variant.
            opened: Opens it: the plain step as it can be taken meanwhile, and its own.
            labels: What else to say of its figures.
            captures: Whether it captures stages in its first steps.
        """
        labels = {"variant": name, **(labels or {})}
        until_s = self.bench.budget.used_s + self.share_s(name)
        if not self.bench.budget.allows(name):
            yield missing_figure("step_ms", "no time was left", labels)
            return
        self._tidy()
        try:
            with opened() as (plain_step, step):
                yield from self._rounds(plain_step, step, labels, until_s, WARM_STEPS if captures else 1)
        except Exception as error:
            yield missing_figure("step_ms", error, labels)

    def won(self, name: str, over: str) -> bool:
        """Returns whether both variants were measured and the first is faster."""
        return name in self.speedup and over in self.speedup and self.speedup[name] > self.speedup[over]

    def _rounds(
        self, plain_step: Step, step: Step, labels: dict[str, str], until_s: float, warm_steps: int
    ) -> Iterator[Figure]:
        for _ in range(warm_steps):
            step()
        losses = self.work.losses(step)
        far = max(map(_difference, losses, self._plain))
        if math.isinf(far):
            raise ArithmeticError(f"its losses are {losses}, the plain loop's {self._plain}")
        yield Figure(name="loss_difference", source="measured", value=far, labels=labels)
        yield from self._peak(labels)  # before the plain loop takes turns with it
        for each in (plain_step, step):
            time_ms(each, self.bench, 1)
        plain, ours = [], []
        for number in range(MIN_ROUNDS if self.bench.dry_run else ROUNDS):
            if number >= MIN_ROUNDS and self.bench.budget.used_s > until_s:
                break
            plain.append(time_ms(plain_step, self.bench, self._steps))
            ours.append(time_ms(step, self.bench, self._steps))
        ratios = [theirs / mine for theirs, mine in zip(plain, ours, strict=True)]
        if far <= MAX_LOSS_DIFFERENCE:
            self.speedup[labels["variant"]] = statistics.median(ratios)
        else:
            self.bench.notes.append(
                f"{labels['variant']}: losses differ by {far:.3g} of theirs: its times do not count"
            )
        yield median_figure("step_ms", ours, labels=labels)
        yield median_figure("speedup", ratios, labels=labels)

    def _peak(self, labels: dict[str, str]) -> Iterator[Figure]:
        if self.bench.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.bench.torch_device)
            yield Figure(name="peak_gib", source="measured", value=peak / 2**30, labels=labels)

    def _tidy(self) -> None:
        """Gives back what variants before held, and forgets their peak; an error that the device keeps comes again."""
        if self.bench.on_gpu:
            gc.collect()
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self.bench.torch_device)
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.bench.torch_device)


def _difference(ours: float, theirs: float) -> float:
    """Returns the relative difference of two losses; infinite where only one of them is a number."""
    if math.isfinite(ours) and math.isfinite(theirs):
        return abs(ours - theirs) / max(1e-9, abs(theirs))
    return 0.0 if str(ours) == str(theirs) else math.inf


def time_ms(step: Step, bench: Bench, steps: int) -> float:
    """Returns the milliseconds of a step, of so many in a row."""
    bench.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    bench.synchronize()
    return (time.perf_counter() - start) * 1e3 / steps
