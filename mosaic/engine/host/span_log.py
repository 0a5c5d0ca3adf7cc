"""When pieces of work ran on the host: noted in nanoseconds, told in milliseconds."""

from __future__ import annotations

import time
from collections import deque

from mosaic.timeline import Span

_MAX_SPANS = 20_000


class SpanLog:
    """The last 20,000 pieces of work; threads may note at the same time."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, str, tuple[int, ...], int, int, int]] = deque(maxlen=_MAX_SPANS)

    def note(self, module: str, phase: str, slots: tuple[int, ...], step: int, start_ns: int) -> None:
        """Notes work that started at ``start_ns`` on ``time.perf_counter_ns`` and ends now."""
        self._spans.append((module, phase, slots, step, start_ns, time.perf_counter_ns()))

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
        """Returns what ran, by its start, in milliseconds since ``origin_ns``."""
        return tuple(
            Span(
                module=module,
                phase=phase,  # type: ignore[arg-type]
                slots=slots,
                step=step,
                start_ms=(start - origin_ns) / 1e6,
                end_ms=(end - origin_ns) / 1e6,
            )
            for module, phase, slots, step, start, end in sorted(self._spans, key=lambda span: span[4])
        )

    @property
    def origin_ns(self) -> int:
        """When the oldest of them started."""
        return min((span[4] for span in self._spans), default=0)

    def clear(self) -> None:
        """Forgets them."""
        self._spans.clear()
