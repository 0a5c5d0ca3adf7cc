"""Time and memory of modules at any degree, quota and neighbour. Needs neither torch nor a GPU."""

from mosaic.cost.analytic_cost import AnalyticCost
from mosaic.cost.interference import BandwidthInterference, Interference, MeasuredInterference, NoInterference
from mosaic.cost.model import ADAMW_BYTES, CostModel
from mosaic.cost.protocol import Cost
from mosaic.cost.surfaces import ScalingSurface

__all__ = [
    "ADAMW_BYTES",
    "AnalyticCost",
    "BandwidthInterference",
    "Cost",
    "CostModel",
    "Interference",
    "MeasuredInterference",
    "NoInterference",
    "ScalingSurface",
]
