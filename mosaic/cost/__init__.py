"""Time and memory of modules at any degree, quota and neighbour. Needs neither torch nor a GPU."""

from mosaic.cost.alpha_beta import AlphaBetaSurface
from mosaic.cost.interference import AssumedPair, Interference, MeasuredInterference, NoInterference
from mosaic.cost.model import Cost, CostModel
from mosaic.cost.sampling import held_out_errors, next_sample
from mosaic.cost.surface import ScalingSurface, Surface

__all__ = [
    "AlphaBetaSurface",
    "AssumedPair",
    "Cost",
    "CostModel",
    "Interference",
    "MeasuredInterference",
    "NoInterference",
    "ScalingSurface",
    "Surface",
    "held_out_errors",
    "next_sample",
]
