"""Measures modules: time and memory at every degree and quota, and interference."""

from __future__ import annotations

from mosaic.profiler.cache import ProfileCache, open_cache, structures_of
from mosaic.profiler.communication import measure_ring, measure_route
from mosaic.profiler.counters import Counters, open_counters
from mosaic.profiler.noise import CpuTime, ForeignLoad, Retries
from mosaic.profiler.settings import ProfileSettings, default_quotas
from mosaic.profiler.subject import Subject, repeat_batch, traffic_of
from mosaic.profiler.sweep import ModuleFailedError, ProgressCallback, environment_of, profile_modules
from mosaic.profiler.timing import measure_beside

__all__ = [
    "Counters",
    "CpuTime",
    "ForeignLoad",
    "ModuleFailedError",
    "ProfileCache",
    "ProfileSettings",
    "ProgressCallback",
    "Retries",
    "Subject",
    "default_quotas",
    "environment_of",
    "measure_beside",
    "measure_ring",
    "measure_route",
    "open_cache",
    "open_counters",
    "profile_modules",
    "repeat_batch",
    "structures_of",
    "traffic_of",
]
