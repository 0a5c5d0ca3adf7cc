"""The same loop on several ranks: modules on any subset of them, inputs and outputs routed, gradients reduced."""

from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.running.handle import RankHandle

__all__ = ["RankHandle", "colocate_ranks"]
