"""How ``mosaic.pipeline`` shares sequences out over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mosaic.context.distribute import CONTEXT_METHODS
from mosaic.context.plan import ContextPlan, plan_context
from mosaic.context.words import MaskWords


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """Ranks that share each sequence of a pipeline's language model.

    Raises:
        ValueError: A number is below 1, or there is no such method.
    """

    ranks: int
    """That share each sequence."""
    mask: Callable[[Mapping[str, Any]], MaskWords]
    """Who sees whom in a microbatch, all rows alike, such as
    ``lambda microbatch: causal(microbatch["input_ids"].shape[1])``; with ``Pipeline.ahead`` a thread beside the step
    calls it."""
    method: str = "lpt"
    """Name in ``CONTEXT_METHODS``."""
    exchange: str = "gather"
    """Whether all keys and values travel, or those that are read (``needed``)."""
    heads: int = 1
    """Of keys, how many are gathered together."""
    block: int = 128
    """Tokens that stay together."""

    def __post_init__(self) -> None:
        for name in ("ranks", "heads", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")
        if self.method not in CONTEXT_METHODS:
            raise ValueError(f"method={self.method!r} shares no sequences out; use one of {', '.join(CONTEXT_METHODS)}")

    def plan(self, microbatch: Mapping[str, Any]) -> ContextPlan:
        """Plans a microbatch's attention.

        Raises:
            ValueError: The sequence has fewer blocks than there are ranks.
        """
        return plan_context(self.mask(microbatch), self.ranks, block=self.block, method=self.method)
