"""Candidate strategies for the layers of a chunk."""

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
    """A strategy for each layer of a chunk, with their costs."""

    strategies: tuple[int, ...]
    """Strategy index of each layer."""
    forward_ns: int
    """Added time of forward."""
    backward_ns: int
    """Added time of backward."""
    kept_bytes: int
    """Bytes from the start of forward to the end of backward."""
    workspace_bytes: int
    """Further bytes while forward or backward runs: layers' workspace, and activations that are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Finds candidates of chunks, equal ones once (PipeWeaver, section 6.3).

    Raises:
        ValueError: ``count`` is under 2.
    """

    count: int = 8
    """Most candidates of a chunk: the fastest, the leanest, and the fastest of each memory bucket between them."""
    weights_apart: bool = False
    """True if backward for weights is a task of its own, until whose end recomputed activations stay."""
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
                    (_ns(each.extra_forward_ms, each.name), _ns(each.extra_backward_ms, each.name), each.kept_bytes)
                    for each in layer.strategies
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
                kept_bytes=kept_bytes,
                workspace_bytes=workspace_bytes(
                    [
                        (layer.strategies[way].kept_bytes, layer.strategies[0].kept_bytes, layer.workspace_bytes)
                        for layer, way in zip(layers, ways, strict=True)
                    ],
                    weights_apart=self.weights_apart,
                ),
            )
            for forward, backward, kept_bytes, _, ways in load_search().tuning_candidates(rows, count=self.count)
        )


def _ns(time_ms: float, strategy: str) -> int:
    if not 0 <= time_ms < math.inf:  # also catches NaN
        raise ValueError(f"strategy {strategy!r} adds {time_ms} ms; use a finite time, 0 or more")
    return round(time_ms * NS_PER_MS)
