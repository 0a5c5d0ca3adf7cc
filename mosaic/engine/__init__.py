"""The engine: finds a model's modules, runs them on lanes, and keeps the plain loop's numbers."""

from __future__ import annotations

from mosaic.engine.finding.find import find_modules
from mosaic.engine.handle import Handle
from mosaic.engine.options import Options, RankSettings
from mosaic.engine.parallel import parallel
from mosaic.take_turns import TrialSettings

__all__ = ["Handle", "Options", "RankSettings", "TrialSettings", "find_modules", "parallel"]
