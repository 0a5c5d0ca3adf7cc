"""Measuring modules: time of forward and backward at every quota, memory, and what neighbours cost."""

from __future__ import annotations

from mosaic.profiler.noise import ForeignLoad
from mosaic.profiler.preserve import preserved
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject
from mosaic.profiler.sweep import profile_modules

__all__ = ["ForeignLoad", "ProfileSettings", "Subject", "preserved", "profile_modules"]
