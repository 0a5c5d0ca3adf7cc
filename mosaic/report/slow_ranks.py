"""Slow ranks: ranks whose own computing takes longer than that of the same modules on other ranks.

Waiting is separate from computing: a waiting rank is not slow. The ranks of a pipeline have different layers, so there
the comparison is of times over planned times. Modules are compared by the medians of their steps, without the first
step if others remain. A delay of a step or two does not make a rank slow: a slow rank takes longer in most steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from mosaic.errors import InvalidFileError
from mosaic.rank_trace import RankTrace
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.table import Table

MIN_RATIO = 1.25
"""Least ratio of a slow module: ranks' rows may differ by one, machines by some percent."""
MIN_STEP_SHARE = 0.75
"""Least share of steps with that ratio: a machine that is sometimes busy is not slow."""
MIN_LOST_SHARE = 0.03
"""Least lost share of a step's time to report."""
_Times = Mapping[tuple[str, str], Mapping[int, tuple[float, float]]]
"""By module and phase, then by step: milliseconds, and the planned ones (1 without a plan)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowModule:
    """A module and phase that takes longer on a rank than on others."""

    module: str
    phase: str
    here_ms: float
    """Median of a step on the rank."""
    elsewhere_ms: float
    """Median of the other ranks' medians; for planned work, this rank's time at their pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank's steps: medians of its computing and of its waits, of which several threads' add up."""

    rank: int
    host: str
    compute_ms: float
    wait_ms: float
    num_compared: int
    """Modules and phases that other ranks run, too."""
    slow: tuple[SlowModule, ...]
    """Slow modules, most lost time first; empty for a rank that is not slow."""
    lost_ms: float
    """Lost time of a step against other ranks; 0 for a rank that is not slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """Comparison of all ranks with traces, by number."""

    ranks: tuple[RankSummary, ...]
    missing: tuple[int, ...]
    """Ranks of the run without traces."""
    num_steps: int

    @property
    def slow(self) -> tuple[RankSummary, ...]:
        """Slow ranks, the slowest first."""
        return tuple(sorted((rank for rank in self.ranks if rank.slow), key=lambda rank: -rank.lost_ms))

    def sentences(self) -> tuple[str, ...]:
        """Describes the result in sentences."""
        lines = []
        for rank in self.slow:
            modules = "; ".join(
                f"{slow.module} {slow.phase} {slow.here_ms:.2f} ms instead of {slow.elsewhere_ms:.2f} "
                f"({slow.here_ms / slow.elsewhere_ms:.1f} times)"
                for slow in rank.slow
            )
            lines.append(f"rank {rank.rank} ({rank.host}) is slow, by {rank.lost_ms:.2f} ms a step: {modules}")
        if not lines and any(rank.num_compared for rank in self.ranks):
            lines.append("no rank is slow: modules of several ranks take about as long on each")
        elif not lines:
            lines.append("nothing can be compared: no module runs on two of these ranks")
        if self.missing:
            lines.append(f"without a trace: rank {', '.join(map(str, self.missing))}")
        return tuple(lines)

    def table(self) -> Table:
        """Returns a row for each rank."""
        rows = []
        for rank in self.ranks:
            lost = f"{rank.lost_ms:.2f}" if rank.slow else "-"
            rows.append((str(rank.rank), f"{rank.compute_ms:.2f}", f"{rank.wait_ms:.2f}", lost, rank.host))
        columns = (">rank", ">computes\nms a step", ">waits\nms a step", ">slow by\nms a step", "machine")
        return make_table(f"{self.num_steps} steps, measured", columns, rows)


def compare_ranks(traces: Sequence[RankTrace]) -> RankComparison:
    """Finds the slow ranks of one run.

    Raises:
        InvalidFileError: Fewer than two traces, two of one rank, traces of different runs, or one without work.
    """
    if len(traces) < 2:
        raise InvalidFileError("one trace compares nothing; give the traces of two or more ranks")
    traces = sorted(traces, key=lambda trace: trace.rank)
    for first, second in pairwise(traces):
        if first.rank == second.rank:
            raise InvalidFileError(f"there are two traces of rank {first.rank}; give one of each rank")
        if first.run != second.run:
            raise InvalidFileError("the traces are of different runs; give those of one start of the ranks")
    common = set.intersection(*({span.step for span in trace.spans} for trace in traces))
    if not common:
        raise InvalidFileError("the traces have no step in common; write them at the same time on all ranks")
    steps = common - {min(common)} or common
    times = {trace.rank: _times(trace, steps) for trace in traces}
    return RankComparison(
        ranks=tuple(_summary(trace, times, steps) for trace in traces),
        missing=tuple(sorted(set(range(traces[0].num_ranks)) - set(times))),
        num_steps=len(steps),
    )


def _times(trace: RankTrace, steps: set[int]) -> _Times:
    times: dict[tuple[str, str], dict[int, tuple[float, float]]] = defaultdict(dict)
    for span in trace.spans:
        if span.kind == "compute" and span.step in steps:
            by_step = times[span.module, span.phase]
            before, planned = by_step.get(span.step, (0.0, 0.0))
            by_step[span.step] = before + span.duration_ms, planned + span.expected_ms
    return times


def _summary(trace: RankTrace, times: Mapping[int, _Times], steps: set[int]) -> RankSummary:
    slow, num_compared = [], 0
    for work, own_times in times[trace.rank].items():
        others = [_paces(table[work]) for rank, table in times.items() if rank != trace.rank and work in table]
        if not others:
            continue
        num_compared += 1
        here, amount = _paces(own_times), median(planned or 1.0 for _, planned in own_times.values())
        here_pace, pace = median(here.values()), median(median(other.values()) for other in others)
        same = {step: [other[step] for other in others if step in other] for step in here}
        ratios = [here[step] / median(paces) for step, paces in same.items() if paces]
        longer = sum(ratio >= MIN_RATIO for ratio in ratios)
        if here_pace >= MIN_RATIO * pace and longer >= MIN_STEP_SHARE * len(ratios):
            here_ms, elsewhere_ms = amount * here_pace, amount * pace
            slow.append(SlowModule(module=work[0], phase=work[1], here_ms=here_ms, elsewhere_ms=elsewhere_ms))
    slow.sort(key=lambda item: item.elsewhere_ms - item.here_ms)
    by_kind = {kind: dict.fromkeys(steps, 0.0) for kind in ("compute", "wait")}
    for span in trace.spans:
        if span.step in steps:
            by_kind[span.kind][span.step] += span.duration_ms
    compute_ms, wait_ms = (median(by_step.values()) for by_step in by_kind.values())
    lost_ms = sum(item.here_ms - item.elsewhere_ms for item in slow)
    is_slow = lost_ms > MIN_LOST_SHARE * (compute_ms + wait_ms)
    return RankSummary(
        rank=trace.rank,
        host=trace.host,
        compute_ms=compute_ms,
        wait_ms=wait_ms,
        num_compared=num_compared,
        slow=tuple(slow) if is_slow else (),
        lost_ms=lost_ms if is_slow else 0.0,
    )


def _paces(works: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Returns time over planned time by step; a span of no length has the least pace."""
    return {step: max(time_ms, 1e-9) / (planned_ms or 1.0) for step, (time_ms, planned_ms) in works.items()}
