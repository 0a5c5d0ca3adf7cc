"""Spindle: modules cut into equal operators, sliced over waves in which all end together.

Spindle (ASPLOS 2025, arXiv 2409.03365), sections 3.1 to 3.4 and appendix B, in the order of this file:

1. levels of MetaOps;
2. the continuous optimum of a level: with real numbers of devices and operators, all MetaOps start and end together
   (malleable project scheduling); bisection finds the end;
3. two integer numbers of devices per MetaOp (bi-point discretisation);
4. wavefront scheduling: waves filled greedily, longer slices cut at the end of the shortest.

Between two degrees the speed-up s(n) = T(1) / T(n) is linear, with s(0) = 0, as in the authors' released planner; only
this gives the paper's example (8.4 and 3.6 of 12 operators). *Ours*: a MetaOp is one module, a chain of as many equal
operators as it has layers (``SearchOptions.layers``). Degrees without speed-up are dropped, because the theorem of
section 3.3 needs decreasing times. Levels are longest paths, because breadth-first depth (section 3.1) puts C beside B
for A -> B -> C with A -> C. Where the paper has no rule for a wave, the released planner's applies (most devices first,
then longest); *extend, then align* is the paper's order. Placement (section 3.5) has no cost in the model; devices are
consecutive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mosaic.graph import Part
from mosaic.solver.planners.waves import Job, Wave, Widths, plan_waves, widths_of
from mosaic.solver.task import Answer, Task

_TOLERANCE = 1e-9
"""Relative tolerance of the bisection and of integer numbers of devices (the paper's epsilon)."""


def plan(task: Task) -> Answer:
    """Plans the waves of the levels in order; the backward pass runs them in reverse."""
    widths, layers = widths_of(task), task.search.layers
    waves = [
        wave
        for level in task.graph.levels
        for wave in _waves_of_level(level, [widths[name] for name in level], layers, task.machine.num_devices)
    ]
    return plan_waves(task, [waves])


def _waves_of_level(names: Sequence[str], widths: Sequence[Widths], layers: int, num_devices: int) -> Iterator[Wave]:
    metaops = [MetaOp.of(own, layers) for own in widths]
    end, devices = continuous_optimum(metaops, num_devices)
    slices = []
    for index, (metaop, share) in enumerate(zip(metaops, devices, strict=True)):
        (degree, operators), *rest = two_points(metaop, share, end)
        count = round(operators)  # the second tuple gets the other operators
        slices.append(Slice(metaop=index, degree=degree, count=count))
        slices += [Slice(metaop=index, degree=other, count=layers - count) for other, _ in rest]
    done = [0] * len(names)
    for wave in schedule_level(metaops, [piece for piece in slices if piece.count > 0], num_devices):
        jobs = []
        for piece in wave:
            index = piece.metaop
            option = next(option for option in widths[index] if option.degree == piece.degree)
            part = Part(module=names[index], first=done[index], count=piece.count, total=layers)
            jobs.append(Job(part, option))
            done[index] += piece.count
        yield tuple(jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaOp:
    """A chain of equal operators, and the scaling of one operator over devices."""

    degrees: tuple[int, ...]
    """Possible numbers of devices, increasing."""
    times: tuple[float, ...]
    """T(n): time of one operator at each, decreasing; in any unit."""
    num_operators: int
    """L, the number of operators."""

    @classmethod
    def of(cls, widths: Widths, num_layers: int) -> MetaOp:
        """Returns a module's layers, with equal shares of forward and backward in nanoseconds."""
        falling: dict[int, float] = {}
        for option in widths:
            time = option.latency_ns / num_layers
            if not falling or time < min(falling.values()):
                falling[option.degree] = time
        return cls(degrees=tuple(falling), times=tuple(falling.values()), num_operators=num_layers)

    def time(self, degree: int) -> float:
        """Returns T(degree); the degree is one of ``degrees``."""
        return self.times[self.degrees.index(degree)]

    def devices_for(self, time: float) -> float:
        """Returns the real number of devices at which one operator takes ``time`` (``Find_Inverse_Value``).

        Below its least time, this is the largest degree.
        """
        if time >= self.times[0]:  # s(0) = 0: a time share of the first degree
            return self.degrees[0] * self.times[0] / time
        # times decrease: the first one that is at most `time`
        above = min(bisect_left(self.times, -time, key=lambda value: -value), len(self.times) - 1)
        low, high = self.times[above - 1] if above else self.times[0], self.times[above]
        if time <= high or not above:
            return float(self.degrees[above])
        # interpolates between s(n_low) = 1/low and s(n_high) = 1/high, in units of T(1)
        part = (1 / time - 1 / low) / (1 / high - 1 / low) if high > 0 else 0.0
        return self.degrees[above - 1] + (self.degrees[above] - self.degrees[above - 1]) * part


def continuous_optimum(metaops: Sequence[MetaOp], num_devices: int) -> tuple[float, tuple[float, ...]]:
    """Returns C*, the least time at which all MetaOps end together, and the devices of each.

    Appendix B, Algorithm 2 (line 6's sum is the one over n_m). Units are those of the MetaOps' times.

    Args:
        metaops: At least one; no degree exceeds ``num_devices``.
        num_devices: N.
    """

    def devices(end: float) -> list[float]:
        return [
            metaop.devices_for(end / metaop.num_operators) if metaop.times[0] > 0 and end > 0 else 0.0
            for metaop in metaops
        ]

    low = max(metaop.times[-1] * metaop.num_operators for metaop in metaops)  # line 2
    high = sum(metaop.times[0] * metaop.num_operators for metaop in metaops)
    if sum(devices(low)) <= num_devices:
        return low, tuple(devices(low))
    while high - low > _TOLERANCE * high:  # line 3
        middle = (low + high) / 2
        if sum(devices(middle)) < num_devices:  # line 6
            high = middle
        else:
            low = middle
    return high, tuple(devices(high))


def two_points(metaop: MetaOp, devices: float, end: float) -> tuple[tuple[int, float], ...]:
    """Splits a MetaOp with a real number of devices into one tuple below and one above; together they take ``end``.

    Section 3.3's bi-point discretisation, as devices n and operators l, before rounding:
    l_high + l_low = L and T(n_high) l_high + T(n_low) l_low = C*.
    Below the first degree, n_low = 0 is idle time, and only the other tuple remains.
    """
    for degree in metaop.degrees:
        if abs(devices - degree) <= _TOLERANCE * degree * 10:
            return ((degree, metaop.num_operators),)
    above = min(bisect_left(metaop.degrees, devices), len(metaop.degrees) - 1)
    high = metaop.degrees[above]
    if not above:
        return ((high, metaop.num_operators),)
    low = metaop.degrees[above - 1]
    count = (metaop.num_operators * metaop.time(low) - end) / (metaop.time(low) - metaop.time(high))
    count = min(max(count, 0.0), float(metaop.num_operators))
    return (high, count), (low, metaop.num_operators - count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some operators of one MetaOp in one wave."""

    metaop: int
    """Index in the level."""
    degree: int
    """Devices."""
    count: int
    """Operators."""


def schedule_level(metaops: Sequence[MetaOp], remaining: list[Slice], num_devices: int) -> list[list[Slice]]:
    """Cuts the slices of a level into waves with at most one slice of each MetaOp.

    Each wave completes at least one slice, so there are at most as many waves as slices.

    Args:
        metaops: The independent MetaOps of the level.
        remaining: Their rounded tuples.
        num_devices: N; no slice has more.
    """
    waves: list[list[Slice]] = []
    while remaining:
        proposed = _propose(remaining, metaops, num_devices)
        aligned = _align(_extend(proposed, metaops, num_devices), metaops)
        for before, after in zip(proposed, aligned, strict=True):
            remaining.remove(before)
            if after.count < before.count:  # the remainder keeps its own number of devices
                remaining.append(replace(before, count=before.count - after.count))
        waves.append(aligned)
    return _join(waves)


def _length(piece: Slice, metaops: Sequence[MetaOp]) -> float:
    return metaops[piece.metaop].time(piece.degree) * piece.count


def _propose(remaining: Sequence[Slice], metaops: Sequence[MetaOp], num_devices: int) -> list[Slice]:
    """Takes slices that fit: most devices first, then the longest."""
    wave: list[Slice] = []
    free = num_devices
    for piece in sorted(remaining, key=lambda each: (-each.degree, -_length(each, metaops), each.metaop)):
        if piece.degree <= free and all(other.metaop != piece.metaop for other in wave):
            wave.append(piece)
            free -= piece.degree
    return wave


def _extend(slices: Sequence[Slice], metaops: Sequence[MetaOp], num_devices: int) -> list[Slice]:
    """Raises one slice at a time to its next degree, the longest with room first."""
    wave = list(slices)
    while True:
        free = num_devices - sum(piece.degree for piece in wave)
        for place in sorted(range(len(wave)), key=lambda index: -_length(wave[index], metaops)):
            larger = [n for n in metaops[wave[place].metaop].degrees if 0 < n - wave[place].degree <= free]
            if larger:
                wave[place] = replace(wave[place], degree=larger[0])
                break
        else:
            return wave


def _align(wave: Sequence[Slice], metaops: Sequence[MetaOp]) -> list[Slice]:
    """Cuts every slice to about the time of the shortest."""
    end = min(_length(piece, metaops) for piece in wave)
    aligned = []
    for piece in wave:
        time = metaops[piece.metaop].time(piece.degree)
        fitting = round(end / time) if time > 0 else piece.count
        aligned.append(replace(piece, count=min(max(fitting, 1), piece.count)))
    return aligned


def _join(waves: Sequence[list[Slice]]) -> list[list[Slice]]:
    """Joins successive waves with the same MetaOps on the same numbers of devices."""
    joined: list[list[Slice]] = []
    for wave in waves:
        ordered = sorted(wave, key=lambda piece: piece.metaop)
        last = joined[-1] if joined else []
        if [(p.metaop, p.degree) for p in ordered] == [(p.metaop, p.degree) for p in last]:
            joined[-1] = [replace(a, count=a.count + b.count) for a, b in zip(last, ordered, strict=True)]
        else:
            joined.append(ordered)
    return joined
