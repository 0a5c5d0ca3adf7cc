"""Plans stages and slots from costs. Importing it loads neither torch nor ortools."""

from mosaic.solver.gahc.stage_eval import StageEvaluator
from mosaic.solver.limits import SearchLimits
from mosaic.solver.methods import METHODS
from mosaic.solver.options import DeploymentOption
from mosaic.solver.solve import solve
from mosaic.solver.stage import StageResult
from mosaic.solver.task import SearchOptions

__all__ = [
    "METHODS",
    "DeploymentOption",
    "SearchLimits",
    "SearchOptions",
    "StageEvaluator",
    "StageResult",
    "solve",
]
