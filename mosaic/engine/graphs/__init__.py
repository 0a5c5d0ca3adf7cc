"""Stages of a step as CUDA graphs: captured once in their partitions, and launched as one from then on."""

from mosaic.engine.graphs.module_state import Branch, Eager
from mosaic.engine.graphs.stages import StageGraphs

__all__ = ["Branch", "Eager", "StageGraphs"]
