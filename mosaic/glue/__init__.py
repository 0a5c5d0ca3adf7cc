"""Builds multimodal models from unimodal ones: towers in front of a language model."""

from mosaic.glue.model import MultimodalModel
from mosaic.glue.parallel import Parallel, parallelize
from mosaic.glue.tower import Tower

Glue = MultimodalModel
"""Former name of ``MultimodalModel``."""

__all__ = ["Glue", "MultimodalModel", "Parallel", "Tower", "parallelize"]
