"""Slow ranks: ranks whose own computing takes longer than that of the same modules on other ranks.

Waiting is separate from computing: a waiting rank is not slow. The ranks of a pipeline have different layers, so there
the comparison is of times over planned times. Modules are compared by the medians of their steps, without the first
step if others remain. A delay of a step or two does not make a rank slow: a slow rank takes longer in most steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mosaic.errors import InvalidFileError
from mosaic.rank_trace import RankSpan, RankTrace

MIN_RATIO = 1.25
"""Least ratio of a slow module: ranks' rows may differ by one, machines by some percent."""
MIN_STEP_SHARE = 0.75
"""Least share of steps with that ratio: a machine that is sometimes busy is not slow."""
MIN_LOST_SHARE = 0.03
"""Least lost share of a step's time to report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowModule:
    """A module and phase that takes longer on a rank than on others."""

    module: str
    phase: str
    here_ms: float
    """Median of a step on the rank."""
    elsewhere_ms: float
    """Median of the other ranks' medians; for planned work, this rank's time at their pace."""

    @property
    def ratio(self) -> float:
        """Ratio of both times."""
        return self.here_ms / self.elsewhere_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank's steps."""

    rank: int
    host: str
    compute_ms: float
    """Computing in a step, the median."""
    wait_ms: float
    """Waiting for other ranks in a step, the median; waits of several threads add up."""
    num_compared: int
    """Modules and phases that other ranks run, too."""
    slow: tuple[SlowModule, ...]
    """Slow modules, most lost time first; empty for a rank that is not slow."""

    @property
    def lost_ms(self) -> float:
        """Lost time of a step, against other ranks."""
        return sum(module.here_ms - module.elsewhere_ms for module in self.slow)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """Comparison of all ranks with traces."""

    ranks: tuple[RankSummary, ...]
    """By number."""
    missing: tuple[int, ...]
    """Ranks of the run without traces."""
    num_steps: int
    """Compared steps."""

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
                f"({slow.ratio:.1f} times)"
                for slow in rank.slow
            )
            lines.append(f"rank {rank.rank} ({rank.host}) is slow, by {rank.lost_ms:.2f} ms a step: {modules}")
        if not lines:
            if any(rank.num_compared for rank in self.ranks):
                lines.append("no rank is slow: what several of them compute takes about as long on each")
            else:
                lines.append("nothing can be compared: no module runs on two of these ranks")
        if self.missing:
            lines.append(f"not looked at, since no trace was given: rank {', '.join(map(str, self.missing))}")
        return tuple(lines)


def compare_ranks(traces: Sequence[RankTrace]) -> RankComparison:
    """Finds the slow ranks of one run.

    Raises:
        InvalidFileError: Fewer than two traces, two of one rank, traces of different runs, or one without work.
    """
    _check(traces)
    traces = sorted(traces, key=lambda trace: trace.rank)
    common = set.intersection(*({span.step for span in trace.spans} for trace in traces))
    if not common:
        raise InvalidFileError("the traces have no step in common; write them at the same time on all ranks")
    steps = common - {min(common)} or common
    tables = {trace.rank: _by_step(_of_kind(trace.spans, "compute", steps)) for trace in traces}
    return RankComparison(
        ranks=tuple(_summary(trace, tables, steps) for trace in traces),
        missing=tuple(sorted(set(range(traces[0].num_ranks)) - {trace.rank for trace in traces})),
        num_steps=len(steps),
    )


def _check(traces: Sequence[RankTrace]) -> None:
    if len(traces) < 2:
        raise InvalidFileError("traces of two ranks at least are needed; give all that handle.write_trace() wrote")
    ranks = [trace.rank for trace in traces]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise InvalidFileError(f"there are two traces of rank {', '.join(map(str, twice))}; give one of each rank")
    if len({trace.run for trace in traces}) > 1:
        raise InvalidFileError("the traces are of different runs; give those of one start of the ranks")
    empty = [trace.rank for trace in traces if not trace.spans]
    if empty:
        raise InvalidFileError(
            f"the trace of rank {', '.join(map(str, empty))} has no work; write traces after some steps"
        )


def _of_kind(spans: Iterable[RankSpan], kind: str, steps: set[int]) -> list[RankSpan]:
    return [span for span in spans if span.kind == kind and span.step in steps]


@dataclass(slots=True)
class _Work:
    """Work of one module and phase in one step."""

    time_ms: float = 0.0
    expected_ms: float = 0.0

    @property
    def amount(self) -> float:
        """Planned amount of work; 1 without a plan."""
        return self.expected_ms or 1.0

    @property
    def pace(self) -> float:
        """Time per amount."""
        return self.time_ms / self.amount


_Table = dict[tuple[str, str], dict[int, _Work]]
"""Work by module and phase, then by step."""


def _by_step(spans: Iterable[RankSpan]) -> _Table:
    table: _Table = {}
    for span in spans:
        work = table.setdefault((span.module, span.phase), {}).setdefault(span.step, _Work())
        work.time_ms += span.duration_ms
        work.expected_ms += span.expected_ms
    return table


def _summary(trace: RankTrace, tables: Mapping[int, _Table], steps: set[int]) -> RankSummary:
    slow, compared = [], 0
    for (module, phase), here in tables[trace.rank].items():
        others = [
            table[module, phase] for rank, table in tables.items() if rank != trace.rank and (module, phase) in table
        ]
        if others:
            compared += 1
            amount = statistics.median(work.amount for work in here.values())
            here_ms = amount * _median_pace(here)
            elsewhere_ms = amount * statistics.median(map(_median_pace, others))
            if elsewhere_ms > 0 and here_ms >= MIN_RATIO * elsewhere_ms and _mostly_longer(here, others):
                slow.append(SlowModule(module=module, phase=phase, here_ms=here_ms, elsewhere_ms=elsewhere_ms))
    compute = _per_step(_of_kind(trace.spans, "compute", steps), steps)
    wait = _per_step(_of_kind(trace.spans, "wait", steps), steps)
    lost = sum(item.here_ms - item.elsewhere_ms for item in slow)
    slow.sort(key=lambda item: item.elsewhere_ms - item.here_ms)
    return RankSummary(
        rank=trace.rank,
        host=trace.host,
        compute_ms=compute,
        wait_ms=wait,
        num_compared=compared,
        slow=tuple(slow) if lost > MIN_LOST_SHARE * (compute + wait) else (),
    )


def _median_pace(works: Mapping[int, _Work]) -> float:
    return statistics.median(work.pace for work in works.values())


def _mostly_longer(here: Mapping[int, _Work], others: Sequence[Mapping[int, _Work]]) -> bool:
    """Returns True if a module takes longer than elsewhere in most of the common steps."""
    longer = []
    for step, work in here.items():
        elsewhere = [other[step].pace for other in others if step in other]
        if elsewhere:
            longer.append(work.pace >= MIN_RATIO * statistics.median(elsewhere))
    return sum(longer) >= MIN_STEP_SHARE * len(longer)


def _per_step(spans: Iterable[RankSpan], steps: set[int]) -> float:
    times = dict.fromkeys(steps, 0.0)
    for span in spans:
        times[span.step] += span.duration_ms
    return statistics.median(times.values())
