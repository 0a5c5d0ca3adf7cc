"""The planners that Mosaic is compared with, under the same cost model: each a short file, all behind ``plan_with``.

============== ==============================================================================================
sequential      every module in turn, at its own best degree and quota (Mosaic's own fallback)
megatron        every module in turn, on all devices
distmm          parallel modules on disjoint whole devices, balanced; a reconstruction (``distmm``)
distmm-waves    the same, with every way tried to make waves of a level; ours
spindle         modules sliced over waves (``spindle``, ``malleable``, ``wavefront``)
spindle-optimus devices to the largest marginal gain (``optimus``)
============== ==============================================================================================
"""

from mosaic.solver.planners.coverage import check_schedule
from mosaic.solver.planners.draft import PlannerSettings
from mosaic.solver.planners.plan_with import PLANNERS, plan_with
from mosaic.solver.planners.waves import Part, Run, Span, Wave, WavePlan

__all__ = [
    "PLANNERS",
    "Part",
    "PlannerSettings",
    "Run",
    "Span",
    "Wave",
    "WavePlan",
    "check_schedule",
    "plan_with",
]
