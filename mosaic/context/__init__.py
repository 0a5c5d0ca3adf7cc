"""Plans attention of long sequences over ranks: masks, tiles, assignment of blocks. Needs no torch.

``mosaic.context.attention`` runs these plans and needs torch.
"""

from mosaic.context.distribute import CONTEXT_METHODS, Distribution, distribute
from mosaic.context.items import ItemShare, share_items
from mosaic.context.plan import ContextPlan, ContextSettings, plan_context
from mosaic.context.words import MaskWords, causal, gemma, packed, token_words

__all__ = [
    "CONTEXT_METHODS",
    "ContextPlan",
    "ContextSettings",
    "Distribution",
    "ItemShare",
    "MaskWords",
    "causal",
    "distribute",
    "gemma",
    "packed",
    "plan_context",
    "share_items",
    "token_words",
]
