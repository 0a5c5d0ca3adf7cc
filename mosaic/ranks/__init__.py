"""The same loop on several ranks: modules on any subset of them, inputs and outputs routed, gradients reduced."""

from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.entry import colocate
from mosaic.ranks.handle import RankHandle
from mosaic.ranks.rows import RowRouting, slice_of
from mosaic.ranks.sampler import RankSampler

__all__ = ["RankHandle", "RankSampler", "RowRouting", "colocate", "colocate_ranks", "slice_of"]
