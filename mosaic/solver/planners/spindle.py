"""Spindle: modules cut into equal operators, spread over waves so that all that run in parallel end together.

Spindle (ASPLOS 2025, arXiv 2409.03365), sections 3.1 to 3.4 and appendix B: contraction of chains to MetaOps, levels of
MetaOps, the continuous optimum of each level, two whole numbers of devices for each MetaOp, wavefront scheduling.
Placement (section 3.5) is in ``placing``. *Ours*: a module counts as one chain of equal operators, its layers, whose
number the graph does not know (``PlannerSettings``); degrees that do not pay are dropped, since the theorem of section
3.3 needs times that fall and the paper does not say how it gets there; levels are by longest path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mosaic.graph import ModuleGraph, Part
from mosaic.solver.options import NS_PER_MS
from mosaic.solver.planners.draft import DraftWave, Job, PlannerSettings, Sheet, Widths, levels
from mosaic.solver.planners.estimator import PiecewiseAlphaBeta, looked_at
from mosaic.solver.planners.malleable import MetaOp, continuous_optimum, rounded, two_points
from mosaic.solver.planners.wavefront import schedule_level


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Modules contracted to one MetaOp, first to last, equal in every option."""

    modules: tuple[str, ...]
    """Each feeds the next, and nothing else."""
    operators_each: int
    """Operators of each of them."""
    widths: Widths
    """Options of each of them, by rising degree."""

    def metaop(self, settings: PlannerSettings) -> MetaOp:
        """Returns how one operator scales: a module's forward and backward over its operators, in nanoseconds."""
        times = {option.degree: option.latency_ns / self.operators_each for option in self.widths}
        if settings.estimator == "alpha-beta":
            known = looked_at(tuple(times))
            estimate = PiecewiseAlphaBeta(degrees=known, times=tuple(times[degree] for degree in known))
            times = {degree: estimate.time(degree) for degree in times}
        falling: dict[int, float] = {}
        for degree, time in times.items():
            if not falling or time < min(falling.values()):
                falling[degree] = time
        return MetaOp(
            degrees=tuple(falling),
            times=tuple(falling.values()),
            num_operators=self.operators_each * len(self.modules),
        )

    def parts(self, first: int, count: int) -> tuple[Part, ...]:
        """Returns operators ``first`` to ``first + count`` of the chain as parts of its modules."""
        found = []
        for index, module in enumerate(self.modules):
            start = max(first - index * self.operators_each, 0)
            stop = min(first + count - index * self.operators_each, self.operators_each)
            if start < stop:
                found.append(Part(module=module, first=start, count=stop - start, total=self.operators_each))
        return tuple(found)


def contract(graph: ModuleGraph, widths: Mapping[str, Widths], settings: PlannerSettings) -> list[list[Chain]]:
    """Joins chains of modules that are equal in every option, and returns them by level.

    Section 3.1: i and j are joined where i feeds only j, j is fed only by i, and both are the same operator on inputs
    of the same size; here, where their options and their numbers of operators are equal.
    """
    head: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for name in graph.topological_order():
        before = set(graph.predecessors(name))
        only = next(iter(before)) if len(before) == 1 else None
        joins = (
            only is not None
            and set(graph.successors(only)) == {name}
            and widths[only] == widths[name]
            and settings.layers(only) == settings.layers(name)
        )
        head[name] = head[only] if joins and only is not None else name
        members.setdefault(head[name], []).append(name)

    def waits_for(first: str) -> list[str]:
        return [head[other] for other in graph.predecessors(first)]

    def chain(first: str) -> Chain:
        return Chain(
            modules=tuple(members[first]),
            operators_each=settings.layers(first),
            widths=widths[first],
        )

    return [[chain(first) for first in level] for level in levels(members, waits_for)]


def draw(sheet: Sheet) -> Iterator[Sequence[DraftWave]]:
    """Draws the waves of every level in turn; the backward pass takes them in reverse."""
    levels_of_chains = contract(sheet.graph, sheet.widths, sheet.settings)
    yield [wave for level in levels_of_chains for wave in _waves_of_level(level, sheet.num_devices, sheet.settings)]


def least_ms(sheet: Sheet) -> float:
    """Returns the sum of all levels' C*, in milliseconds: what Fig. 11 holds plans against.

    By Theorem 1 no way to share real numbers of devices among real numbers of operators ends a level sooner, at times
    between degrees as they are interpolated here.
    """
    ends_ns = [
        continuous_optimum(
            [chain.metaop(sheet.settings) for chain in level], sheet.num_devices, sheet.settings.interpolation
        )[0]
        for level in contract(sheet.graph, sheet.widths, sheet.settings)
    ]
    return sum(ends_ns) / NS_PER_MS


def _waves_of_level(level: Sequence[Chain], num_devices: int, settings: PlannerSettings) -> list[DraftWave]:
    metaops = [chain.metaop(settings) for chain in level]
    end, devices = continuous_optimum(metaops, num_devices, settings.interpolation)
    tuples = [
        rounded(two_points(metaop, share, end), metaop.num_operators)
        for metaop, share in zip(metaops, devices, strict=True)
    ]
    done = [0] * len(level)
    waves = []
    for wave in schedule_level(metaops, tuples, num_devices, extend=settings.extend):
        jobs = []
        for piece in wave:
            chain = level[piece.metaop]
            option = next(option for option in chain.widths if option.degree == piece.degree)
            parts = chain.parts(done[piece.metaop], piece.count)
            jobs.append(Job(parts=parts, options=(option,) * len(parts)))
            done[piece.metaop] += piece.count
        waves.append(tuple(jobs))
    return waves
