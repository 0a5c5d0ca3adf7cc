"""The time that modules on one device cost each other: measured pairs, and forms that are fitted to groups."""

from bench.cost.fitting.design import GroupRun, design_runs

from mosaic.cost.interference.bandwidth import Bandwidths
from mosaic.cost.interference.eq8 import Eq8, FullInterference
from mosaic.cost.interference.fitted import InterferenceFit, fit_interference
from mosaic.cost.interference.forms import FORMS, InterferenceForm, find_form
from mosaic.cost.interference.leveling import LeveledBandwidth, Leveling
from mosaic.cost.interference.measured import MeasuredInterference
from mosaic.cost.interference.pairwise import SharedBandwidth, Sharing
from mosaic.cost.interference.protocol import HasBandwidth, Interference, Neighbours, NoInterference, PairShares

__all__ = [
    "FORMS",
    "Bandwidths",
    "Eq8",
    "FullInterference",
    "GroupRun",
    "HasBandwidth",
    "Interference",
    "InterferenceFit",
    "InterferenceForm",
    "LeveledBandwidth",
    "Leveling",
    "MeasuredInterference",
    "Neighbours",
    "NoInterference",
    "PairShares",
    "SharedBandwidth",
    "Sharing",
    "design_runs",
    "find_form",
    "fit_interference",
]
