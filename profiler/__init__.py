"""Measuring modules: time, memory and bandwidth at every degree and quota, and what neighbours cost."""

from __future__ import annotations

from mosaic.cache_folder import default_cache_folder
from mosaic.profiler.cache import ProfileCache, open_cache
from mosaic.profiler.communication import (
    Network,
    measure_ring,
    measure_route,
)
from mosaic.profiler.counters import Counters, Utilisation, open_counters
from mosaic.profiler.identity import environment_of, key_of, structures_of
from mosaic.profiler.noise import CpuTime, ForeignLoad, Retries
from mosaic.profiler.settings import ProfileSettings, QuotaChoice, default_quotas
from mosaic.profiler.subject import Subject, batch_of, repeat_batch, split_batch, traffic_of
from mosaic.profiler.sweep import ProgressCallback, profile_modules
from mosaic.profiler.timing import measure_beside

__all__ = [
    "Counters",
    "CpuTime",
    "ForeignLoad",
    "Network",
    "ProfileCache",
    "ProfileSettings",
    "ProgressCallback",
    "QuotaChoice",
    "Retries",
    "Subject",
    "Utilisation",
    "batch_of",
    "default_cache_folder",
    "default_quotas",
    "environment_of",
    "key_of",
    "measure_beside",
    "measure_ring",
    "measure_route",
    "open_cache",
    "open_counters",
    "profile_modules",
    "repeat_batch",
    "split_batch",
    "structures_of",
    "traffic_of",
]
