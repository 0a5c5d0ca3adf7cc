"""A way of running steps that a trial chose, as plain data: a later start runs them as it did, whatever clocks say."""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.pipelining.fitted_times import FittedTimes
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.semu.rank_hardware import Degrees


@dataclass(frozen=True, kw_only=True)
class KeptWay:
    """What ``Pipeline.kept_way`` gives, and ``mosaic.pipeline(plan=)`` takes with the same model and sample."""

    name: str
    """As people read it."""
    baseline: str
    """One of ``BASELINES``; empty: each step is planned."""
    degrees: Degrees
    """The grid."""
    partition: Partition
    """Where layers are in each pipeline."""
    fitted: FittedTimes
    """What was measured then."""
