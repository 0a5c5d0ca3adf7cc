"""Multimodal models out of unimodal ones: towers that see and hear, glued in front of a language model."""

from mosaic.glue.glue import Glue
from mosaic.glue.parallel import Parallel, parallelize
from mosaic.glue.tower import Tower

__all__ = ["Glue", "Parallel", "Tower", "parallelize"]
