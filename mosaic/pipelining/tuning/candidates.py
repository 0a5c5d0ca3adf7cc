"""Ways to treat the layers of a chunk between forward and backward that are worth a look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mosaic.pipelining.costs import workspace_bytes
from mosaic.pipelining.workload.layers import Layer
from mosaic.search_extension import load_search

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy for each layer of a chunk, and what they come to."""

    strategies: tuple[int, ...]
    """For each layer an index into its strategies."""
    forward_ns: int
    """What they add to forward."""
    backward_ns: int
    """What they add to backward."""
    kept_bytes: int
    """In use from the start of forward to the end of backward."""
    workspace_bytes: int
    """In use above that while forward or backward runs: layers' own workspace, and what is not kept of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Finds candidates of chunks; equal layers are worked out once (PipeWeaver, section 6.3).

    Raises:
        ValueError: ``count`` is under 2.
    """

    count: int = 8
    """The most for one chunk: the fastest, the leanest, and the fastest of each bucket of memory between them."""
    weights_apart: bool = False
    """Whether backward for weights is a task of its own: what backward made anew is then in use until it has run."""
    _known: dict[tuple[Layer, ...], tuple[Candidate, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"count={self.count}; the fastest and the leanest are two")

    def of(self, layers: Sequence[Layer]) -> tuple[Candidate, ...]:
        """Returns up to ``count`` candidates of a chunk with one piece, from the fastest to the leanest.

        Raises:
            ValueError: A layer has no strategy, or a time or a number of bytes is negative or not finite.
            BackendUnavailableError: The extension is not built.
        """
        chunk = tuple(layers)
        if chunk not in self._known:
            self._known[chunk] = self._find(chunk)
        return self._known[chunk]

    def _find(self, layers: tuple[Layer, ...]) -> tuple[Candidate, ...]:
        rows = [
            (
                [
                    (_ns(one.extra_forward_ms, one.name), _ns(one.extra_backward_ms, one.name), one.kept_bytes)
                    for one in layer.strategies
                ],
                layer.workspace_bytes,
            )
            for layer in layers
        ]
        return tuple(
            Candidate(
                strategies=tuple(ways),
                forward_ns=forward,
                backward_ns=backward,
                kept_bytes=kept,
                workspace_bytes=workspace_bytes(
                    [
                        (layer.strategies[way].kept_bytes, layer.strategies[0].kept_bytes, layer.workspace_bytes)
                        for layer, way in zip(layers, ways, strict=True)
                    ],
                    weights_apart=self.weights_apart,
                ),
            )
            for forward, backward, kept, _, ways in load_search().tuning_candidates(rows, count=self.count)
        )


def _ns(time_ms: float, strategy: str) -> int:
    if not 0 <= time_ms < math.inf:  # also catches NaN
        raise ValueError(f"strategy {strategy!r} adds {time_ms} ms; use a finite time, 0 or more")
    return round(time_ms * NS_PER_MS)
