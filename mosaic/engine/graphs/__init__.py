"""Stages of a step as CUDA graphs: captured once in their partitions, and launched as one from then on."""

from mosaic.engine.graphs.branches import Eager, StageBranch
from mosaic.engine.graphs.stages import StageGraphs

__all__ = ["Eager", "StageBranch", "StageGraphs"]
