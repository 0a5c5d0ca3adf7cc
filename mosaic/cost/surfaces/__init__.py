"""How long a module takes at any degree and quota: surfaces through measured times, and where to measure next."""

from mosaic.cost.surfaces.posterior import ShapePosterior
from mosaic.cost.surfaces.sampling import held_out_errors, next_of_both, next_sample, next_shaped_sample
from mosaic.cost.surfaces.shape_prior import shape_of
from mosaic.cost.surfaces.shaped import ShapedSurface, shaped_without
from mosaic.cost.surfaces.surface import ScalingSurface, Surface

__all__ = [
    "ScalingSurface",
    "ShapePosterior",
    "ShapedSurface",
    "Surface",
    "held_out_errors",
    "next_of_both",
    "next_sample",
    "next_shaped_sample",
    "shape_of",
    "shaped_without",
]
