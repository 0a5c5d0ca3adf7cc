"""Operators of a module counted without running them, on tensors that have a shape and no data."""

from mosaic.cost.analytic.autocast import CudaAutocast
from mosaic.cost.analytic.count import count_degrees, count_module

__all__ = ["CudaAutocast", "count_degrees", "count_module"]
