"""The cost of moving a batch between modules that are placed on different devices."""

from __future__ import annotations

from collections.abc import Sequence

from mosaic.hardware import Link
from mosaic.plan import Placement


def reshard_ms(source: Placement, target: Placement, num_bytes: int, link: Link) -> float:
    """Returns the time until every device of ``target`` has its share of what ``source`` made, in milliseconds.

    Each of d devices has 1/d of the batch, in their order. What a device has already does not move. The device that
    sends or receives most decides; nothing else uses the links meanwhile.
    """
    received, sent = _moved(source.devices, target.devices)
    most = max((*received, *sent)) * num_bytes
    return link.latency_us / 1e3 + most / (link.gb_per_s * 1e6) if most > 0 else 0.0


def _moved(sources: Sequence[int], targets: Sequence[int]) -> tuple[list[float], list[float]]:
    """Shares of the batch that each target receives from others, and that each source sends to others."""
    received, sent = [0.0] * len(targets), [0.0] * len(sources)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            # In units of 1 / (both degrees), so that equal shares are equal.
            low = max(i * len(targets), j * len(sources))
            high = min((i + 1) * len(targets), (j + 1) * len(sources))
            if source != target and high > low:
                share = (high - low) / (len(sources) * len(targets))
                received[j] += share
                sent[i] += share
    return received, sent
