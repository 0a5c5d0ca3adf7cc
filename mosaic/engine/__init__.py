"""The engine: finds a model's modules, runs them on lanes, and keeps the plain loop's numbers."""

from __future__ import annotations

from mosaic.engine.colocate import colocate
from mosaic.engine.finding.find import find_modules
from mosaic.engine.handle import Handle
from mosaic.engine.stage import stage
from mosaic.engine.trial.settings import TrialSettings

__all__ = ["Handle", "TrialSettings", "colocate", "find_modules", "stage"]
