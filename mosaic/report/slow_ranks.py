"""Finds slow ranks: ranks on which modules compute longer than on other ranks.

Waiting does not count as computing. Times are medians of the steps, without the first one if there are others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from mosaic.errors import InvalidFileError
from mosaic.report.table import make_table
from mosaic.timeline import RankTrace

if TYPE_CHECKING:
    from rich.table import Table

MIN_RATIO = 1.25
"""Minimum ratio of a slow module: ranks' rows may differ by one, machines by a few percent."""
MIN_LOST_SHARE = 0.03
"""Minimum lost share of a step to report."""
_Times = Mapping[tuple[str, str], Mapping[int, float]]
"""Milliseconds by module and phase, then by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowModule:
    """A module and phase that is slower on a rank than on others."""

    module: str
    phase: str
    here_ms: float
    elsewhere_ms: float
    """Time on this rank at the others' speed."""

    def __str__(self) -> str:
        ratio = self.here_ms / self.elsewhere_ms
        times = f"{self.here_ms:.2f} ms instead of {self.elsewhere_ms:.2f} ({ratio:.1f} times)"
        return f"{self.module} {self.phase} {times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """Median computing and waiting times of one rank in a step."""

    rank: int
    host: str
    compute_ms: float
    wait_ms: float
    slow: tuple[SlowModule, ...]
    """Slow modules, largest loss first; empty if the rank is not slow."""
    lost_ms: float
    """Time lost per step against other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """Comparison of all ranks with traces, by rank."""

    ranks: tuple[RankSummary, ...]
    missing: tuple[int, ...]
    """Ranks without traces."""
    num_steps: int

    @property
    def slow(self) -> tuple[RankSummary, ...]:
        """Slow ranks, the slowest first."""
        return tuple(sorted((rank for rank in self.ranks if rank.slow), key=lambda rank: -rank.lost_ms))

    def sentences(self) -> tuple[str, ...]:
        """Describes the result, slow ranks first."""
        lines = [
            f"rank {rank.rank} ({rank.host}) is slow, {rank.lost_ms:.2f} ms per step: {'; '.join(map(str, rank.slow))}"
            for rank in self.slow
        ]
        lines = lines or ["no rank is slow: modules on several ranks take about the same time on each"]
        if self.missing:
            lines.append(f"no trace of rank {', '.join(map(str, self.missing))}")
        return tuple(lines)

    def table(self) -> Table:
        rows = []
        for rank in self.ranks:
            lost = f"{rank.lost_ms:.2f}" if rank.slow else "-"
            rows.append((str(rank.rank), f"{rank.compute_ms:.2f}", f"{rank.wait_ms:.2f}", lost, rank.host))
        columns = (">rank", ">computes\nms per step", ">waits\nms per step", ">slow by\nms per step", "machine")
        return make_table(f"{self.num_steps} steps, measured", columns, rows)


def compare_ranks(traces: Sequence[RankTrace]) -> RankComparison:
    """Finds the slow ranks of one run.

    Raises:
        InvalidFileError: Fewer than two traces, two of one rank, traces of different runs, or no common step.
    """
    traces = sorted(traces, key=lambda trace: trace.rank)
    if len({trace.rank for trace in traces}) < max(2, len(traces)):
        ranks = ", ".join(str(trace.rank) for trace in traces)
        raise InvalidFileError(f"the traces are of rank {ranks}; pass one trace for each of two or more ranks")
    if len({trace.run for trace in traces}) > 1:
        raise InvalidFileError("the traces are of different runs; pass those of one run")
    common = set.intersection(*({span.step for span in trace.spans} for trace in traces))
    if not common:
        raise InvalidFileError("the traces have no common step; write them at the same time on all ranks")
    steps = common - {min(common)} or common
    times = {trace.rank: _times(trace, steps) for trace in traces}
    return RankComparison(
        ranks=tuple(_summary(trace, times, steps) for trace in traces),
        missing=tuple(sorted(set(range(traces[0].num_ranks)) - set(times))),
        num_steps=len(steps),
    )


def _times(trace: RankTrace, steps: set[int]) -> _Times:
    times: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in trace.spans:
        if span.slots and span.step in steps:
            times[span.module, span.phase][span.step] += span.end_ms - span.start_ms
    return times


def _summary(trace: RankTrace, times: Mapping[int, _Times], steps: set[int]) -> RankSummary:
    computing, waiting = dict.fromkeys(steps, 0.0), dict.fromkeys(steps, 0.0)
    for span in trace.spans:
        if span.step in steps:
            (computing if span.slots else waiting)[span.step] += span.end_ms - span.start_ms
    compute_ms, wait_ms = median(computing.values()), median(waiting.values())
    slow = []
    for work, own in times[trace.rank].items():
        others = [table[work] for rank, table in times.items() if rank != trace.rank and work in table]
        beside = {step: [max(other[step], 1e-9) for other in others if step in other] for step in own}
        ratios = sorted(own[step] / median(times_ms) for step, times_ms in beside.items() if times_ms)
        if ratios and ratios[len(ratios) // 4] >= MIN_RATIO:  # in three of four steps: machines may be busy
            here_ms = median(own.values())
            elsewhere_ms = here_ms / median(ratios)
            slow.append(SlowModule(module=work[0], phase=work[1], here_ms=here_ms, elsewhere_ms=elsewhere_ms))
    slow.sort(key=lambda module: module.elsewhere_ms - module.here_ms)
    lost_ms = sum(module.here_ms - module.elsewhere_ms for module in slow)
    if lost_ms <= MIN_LOST_SHARE * (compute_ms + wait_ms):
        slow, lost_ms = [], 0.0
    own_times = {"compute_ms": compute_ms, "wait_ms": wait_ms, "lost_ms": lost_ms}
    return RankSummary(rank=trace.rank, host=trace.host, slow=tuple(slow), **own_times)
