"""Runs the attention of one sequence over ranks by a ``ContextPlan``; needs torch.

``Attend`` is the attention, ``ContextBatch`` a rank's part of a batch. ``attach`` makes Hugging Face models call it,
and ``gather_items`` gathers the features of images that ranks encoded.
"""

from mosaic.context.attention.attend import Attend, ContextBatch
from mosaic.context.attention.exchange import gather_items, sum_gradients
from mosaic.context.attention.hugging_face import attach, layer_windows

__all__ = ["Attend", "ContextBatch", "attach", "gather_items", "layer_windows", "sum_gradients"]
