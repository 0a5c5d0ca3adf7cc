"""Time and memory of modules at any degree, quota and neighbour. Needs neither torch nor a GPU."""

from mosaic.cost.alpha_beta import AlphaBetaSurface
from mosaic.cost.bandwidth import BandwidthEstimate, Bandwidths
from mosaic.cost.contention import AdditiveInterference, Eq8, FullInterference, HasBandwidth, SharedBandwidth, Sharing
from mosaic.cost.design import Run, design_runs
from mosaic.cost.held_out import errors_of_profile
from mosaic.cost.interference import AssumedPair, Interference, MeasuredInterference, NoInterference
from mosaic.cost.interference_fit import InterferenceFit, fit_interference, rank_forms
from mosaic.cost.leveling import LeveledBandwidth, Leveling
from mosaic.cost.model import ADAMW_BYTES, Cost, CostModel
from mosaic.cost.posterior import ShapePosterior
from mosaic.cost.sampling import held_out_errors, next_sample, next_shaped_sample
from mosaic.cost.shape_prior import shape_of
from mosaic.cost.shaped import ShapedSurface
from mosaic.cost.surface import ScalingSurface, Surface

__all__ = [
    "ADAMW_BYTES",
    "AdditiveInterference",
    "AlphaBetaSurface",
    "AssumedPair",
    "BandwidthEstimate",
    "Bandwidths",
    "Cost",
    "CostModel",
    "Eq8",
    "FullInterference",
    "HasBandwidth",
    "Interference",
    "InterferenceFit",
    "LeveledBandwidth",
    "Leveling",
    "MeasuredInterference",
    "NoInterference",
    "Run",
    "ScalingSurface",
    "ShapePosterior",
    "ShapedSurface",
    "SharedBandwidth",
    "Sharing",
    "Surface",
    "design_runs",
    "errors_of_profile",
    "fit_interference",
    "held_out_errors",
    "next_sample",
    "next_shaped_sample",
    "rank_forms",
    "shape_of",
]
