"""Time and memory of modules at any degree, quota and neighbour. Needs neither torch nor a GPU."""

from mosaic.cost.alpha_beta import AlphaBetaSurface
from mosaic.cost.contention import AdditiveInterference, Eq8, FullInterference, HasBandwidth, SharedBandwidth, Sharing
from mosaic.cost.held_out import errors_of_profile
from mosaic.cost.interference.bandwidth import BandwidthEstimate, Bandwidths
from mosaic.cost.interference.fitting.design import Run, design_runs
from mosaic.cost.interference.leveling import LeveledBandwidth, Leveling
from mosaic.cost.interference.measured import AssumedPair, Interference, MeasuredInterference, NoInterference
from mosaic.cost.interference_fit import InterferenceFit, fit_interference, rank_forms
from mosaic.cost.model import ADAMW_BYTES, Cost, CostModel
from mosaic.cost.surfaces.posterior import ShapePosterior
from mosaic.cost.surfaces.sampling import held_out_errors, next_sample, next_shaped_sample
from mosaic.cost.surfaces.shape_prior import shape_of
from mosaic.cost.surfaces.shaped import ShapedSurface
from mosaic.cost.surfaces.surface import ScalingSurface, Surface

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
