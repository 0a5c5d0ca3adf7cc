"""Every module in turn, each at its own best: what any other plan has to beat."""

from __future__ import annotations

from mosaic.graph import ModuleGraph
from mosaic.solver.gahc.stage_eval import StageEvaluator, StageResult


def one_by_one(graph: ModuleGraph, evaluator: StageEvaluator) -> tuple[StageResult, ...]:
    """Puts every module into a stage of its own, at the degree and quota at which it is fastest alone."""
    stages = [evaluator.evaluate([name]) for name in graph.topological_order()]
    return tuple(stage for stage in stages if stage is not None)
