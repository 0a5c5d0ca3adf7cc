"""Time and memory of modules at any degree, quota and neighbour. Needs neither torch nor a GPU."""

from mosaic.cost.interference import AssumedPair, Interference, MeasuredInterference, NoInterference
from mosaic.cost.model import Cost, CostModel
from mosaic.cost.surface import ScalingSurface

__all__ = [
    "AssumedPair",
    "Cost",
    "CostModel",
    "Interference",
    "MeasuredInterference",
    "NoInterference",
    "ScalingSurface",
]
