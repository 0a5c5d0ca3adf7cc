"""Counts the operators of a module on tensors without data."""

from mosaic.cost.counting.count import count_degrees, count_module
from mosaic.cost.counting.cuda import CudaFunctions
from mosaic.cost.counting.layers import LayerCounts

__all__ = ["CudaFunctions", "LayerCounts", "count_degrees", "count_module"]
