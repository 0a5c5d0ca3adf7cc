"""Measuring modules: time, memory and bandwidth at every degree and quota, and what neighbours cost."""

from __future__ import annotations

from mosaic.cache_folder import default_cache_folder
from mosaic.profiler.cache import ProfileCache, open_cache
from mosaic.profiler.machine.communication import (
    AllReduce,
    Launched,
    Network,
    Ring,
    Route,
    fit_ring,
    measure_launched,
    measure_ring,
    measure_route,
)
from mosaic.profiler.machine.counters import Counters, Utilisation
from mosaic.profiler.machine.noise import ForeignLoad
from mosaic.profiler.measuring.batch import repeat_batch
from mosaic.profiler.measuring.measure import Retries
from mosaic.profiler.quotas import QuotaChoice
from mosaic.profiler.session import SessionCache
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.structure import structures_of
from mosaic.profiler.subject import Subject
from mosaic.profiler.surroundings import environment_of, key_of, open_counters
from mosaic.profiler.sweep import profile_modules
from mosaic.profiler.traffic import traffic_of

__all__ = [
    "AllReduce",
    "Counters",
    "ForeignLoad",
    "Launched",
    "Network",
    "ProfileCache",
    "ProfileSettings",
    "QuotaChoice",
    "Retries",
    "Ring",
    "Route",
    "SessionCache",
    "Subject",
    "Utilisation",
    "default_cache_folder",
    "environment_of",
    "fit_ring",
    "key_of",
    "measure_launched",
    "measure_ring",
    "measure_route",
    "open_cache",
    "open_counters",
    "profile_modules",
    "repeat_batch",
    "structures_of",
    "traffic_of",
]
