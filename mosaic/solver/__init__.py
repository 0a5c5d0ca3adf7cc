"""From costs to a plan: which modules share a stage, and on which slots. Loads neither torch nor ortools."""

from mosaic.solver.gahc.stage_eval import StageEvaluator, StageResult
from mosaic.solver.options import DeploymentOption, QuotaGrid
from mosaic.solver.solve import METHODS, SearchOptions, solve

__all__ = [
    "METHODS",
    "DeploymentOption",
    "QuotaGrid",
    "SearchOptions",
    "StageEvaluator",
    "StageResult",
    "solve",
]
