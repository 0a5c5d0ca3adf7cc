"""The result of a trial as plain data: a later start runs the same plan without another trial."""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.pipelining.fitted_times import FittedTimes
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.rank_hardware import Degrees


@dataclass(frozen=True, kw_only=True)
class KeptWay:
    """Value of ``Pipeline.kept_way``, for ``mosaic.pipeline(plan=)`` with the same model and sample."""

    name: str
    """Readable name."""
    baseline: str
    """One of ``BASELINES``; empty: each step is planned."""
    degrees: Degrees
    """The grid."""
    partition: Partition
    """Layers of each rank of a pipeline."""
    fitted: FittedTimes
    """Measured corrections of the trial."""
