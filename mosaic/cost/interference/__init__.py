"""The time that modules on one device cost each other: measured pairs, and forms with coefficients of a device."""

from mosaic.cost.interference.bandwidth import Bandwidths
from mosaic.cost.interference.eq8 import Eq8, FullInterference
from mosaic.cost.interference.forms import FORMS, Coefficients, InterferenceForm, make_interference
from mosaic.cost.interference.leveling import LeveledBandwidth, Leveling
from mosaic.cost.interference.measured import MeasuredInterference
from mosaic.cost.interference.pairwise import SharedBandwidth, Sharing
from mosaic.cost.interference.protocol import HasBandwidth, Interference, Neighbours, NoInterference, PairShares

__all__ = [
    "FORMS",
    "Bandwidths",
    "Coefficients",
    "Eq8",
    "FullInterference",
    "HasBandwidth",
    "Interference",
    "InterferenceForm",
    "LeveledBandwidth",
    "Leveling",
    "MeasuredInterference",
    "Neighbours",
    "NoInterference",
    "PairShares",
    "SharedBandwidth",
    "Sharing",
    "make_interference",
]
