"""The gate between challenger and champion: paired comparisons, row by row, with limits. Needs numpy only."""

from mosaic.retrain.gate.decide import Contest, decide
from mosaic.retrain.gate.power import Resolution, resolution, resolution_finding
from mosaic.retrain.gate.renewal import Renewal, renewal
from mosaic.retrain.gate.scores import DayScores, Scores, digest_of_rows, joined
from mosaic.retrain.gate.settings import GateSettings
from mosaic.retrain.gate.validity import ModelFacts, validity_findings

__all__ = [
    "Contest",
    "DayScores",
    "GateSettings",
    "ModelFacts",
    "Renewal",
    "Resolution",
    "Scores",
    "decide",
    "digest_of_rows",
    "joined",
    "renewal",
    "resolution",
    "resolution_finding",
    "validity_findings",
]
