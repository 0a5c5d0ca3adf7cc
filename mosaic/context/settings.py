"""Context parallelism of ``mosaic.pipeline``: its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mosaic.context.distribute import CONTEXT_METHODS
from mosaic.context.plan import ContextPlan, plan_context
from mosaic.context.words import MaskWords
from mosaic.errors import unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """Ranks that share each sequence of a pipeline's language model.

    Raises:
        ValueError: A number is below 1, or the method is unknown.
    """

    ranks: int
    """Ranks that share each sequence."""
    mask: Callable[[Mapping[str, Any]], MaskWords]
    """Returns the mask of a microbatch, equal for all rows, such as
    ``lambda microbatch: causal(microbatch["input_ids"].shape[1])``; ``Pipeline.ahead`` calls it in a thread."""
    method: str = "lpt"
    """Name in ``CONTEXT_METHODS``."""
    exchange: str = "gather"
    """Name in ``EXCHANGES``: ``gather`` for all keys and values, ``needed`` for those in use."""
    heads: int = 1
    """Number of key heads gathered at once."""
    block: int = 128
    """Tokens of a block."""

    def __post_init__(self) -> None:
        for name in ("ranks", "heads", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")
        if self.method not in CONTEXT_METHODS:
            raise ValueError(unknown("method", self.method, CONTEXT_METHODS))

    def plan(self, microbatch: Mapping[str, Any]) -> ContextPlan:
        """Plans a microbatch's attention.

        Raises:
            ValueError: The sequence has fewer blocks than ranks.
        """
        return plan_context(self.mask(microbatch), self.ranks, block=self.block, method=self.method)
