"""Greedy agglomerative hierarchical clustering of modules into stages: the paper's Algorithm 1.

Comments name the algorithm's lines. Times are whole nanoseconds and ties go to the first pair, so pruning and caching
do not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

from mosaic.graph import ModuleGraph
from mosaic.solver.gahc.stage_eval import StageEvaluator
from mosaic.solver.stage import StageResult, alone


def cluster(graph: ModuleGraph, evaluator: StageEvaluator) -> tuple[StageResult, ...]:
    """Runs Algorithm 1 and returns stages in topological order; the evaluator is line 13's StageEval.

    If the evaluator's effort is spent, the stages merged so far are the result.
    """
    order = graph.topological_order()
    bit = {name: 1 << index for index, name in enumerate(order)}  # a stage is a bitmask of modules
    feeds = [(bit[edge.source], bit[edge.target]) for edge in graph.edges]

    def names(stage: int) -> list[str]:
        return [name for name in order if bit[name] & stage]

    evaluate = cache(lambda stage: evaluator.evaluate(names(stage)))

    def best_merge() -> tuple[int, int, StageResult] | None:
        """Lines 7 to 16: the pair with the greatest positive gain."""
        best_gain = 0  # line 7
        best: tuple[int, int, StageResult] | None = None
        reach = reachable(stages, feeds)
        for x, y in combinations(range(len(stages)), 2):  # line 8
            if evaluator.countdown.left <= 0:
                break
            if reach[x] >> y & 1 or reach[y] >> x & 1:  # line 9
                continue
            first, second = stages[x], stages[y]
            apart = results[first].latency_ns + results[second].latency_ns
            if not evaluator.can_meet(names(first | second), apart - best_gain - 1):
                continue  # lines 11-12: the gain cannot exceed the best so far
            merged = evaluate(first | second)  # line 13
            if merged is not None and apart - merged.latency_ns > best_gain:  # lines 14-15, Eq. 9
                best_gain, best = apart - merged.latency_ns, (first, second, merged)  # line 16
        return best

    stages = [bit[name] for name in order]  # line 3
    results = {bit[name]: alone(name, evaluator.options[name]) for name in order}  # lines 4-5
    while best := best_merge():  # lines 6 and 17-18
        first, second, merged = best  # line 19
        results[first | second] = merged
        others = [stage for stage in stages if stage not in (first, second)]
        stages = sort_stages([*others, first | second], feeds)  # line 20
    return tuple(results[stage] for stage in stages)  # line 21


def reachable(stages: Sequence[int], feeds: Sequence[tuple[int, int]]) -> list[int]:
    """Returns, for each stage in topological order, a bitmask of the positions of its descendants.

    Merging two stages keeps the stage graph acyclic if and only if neither reaches the other. A direct edge would put a
    module beside one that it depends on, an indirect one would close a cycle. Stages are bitmasks of modules; ``feeds``
    has each edge between modules as two such masks.
    """
    reach = [0] * len(stages)
    for x in reversed(range(len(stages))):
        for y in range(x + 1, len(stages)):
            if any(source & stages[x] and target & stages[y] for source, target in feeds):
                reach[x] |= 1 << y | reach[y]
    return reach


def sort_stages(stages: Sequence[int], feeds: Sequence[tuple[int, int]]) -> list[int]:
    """Sorts stages (bitmasks of modules) topologically; ties go to the earliest module."""
    ordered: list[int] = []
    unsorted = sorted(stages, key=lambda stage: stage & -stage)
    while unsorted:
        remaining = sum(unsorted)
        ready = next(s for s in unsorted if not any(t & s and source & remaining & ~s for source, t in feeds))
        ordered.append(ready)
        unsorted.remove(ready)
    return ordered
