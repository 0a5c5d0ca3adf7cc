"""The cost of moving a batch between modules that are placed on different devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mosaic.hardware import Cluster, Link, Message
from mosaic.plan import Placement


def reshard_ms(source: Placement, target: Placement, num_bytes: int, network: Cluster | Link) -> float:
    """Returns the time until every device of ``target`` has its share of what ``source`` made, in milliseconds.

    Each of d devices has 1/d of the batch, in their order. What a device has already does not move. The device or the
    NIC that sends or receives most decides; nothing else uses the network meanwhile.
    """
    return network.exchange_ms(list(_moved(source.devices, target.devices, num_bytes)))


def _moved(sources: Sequence[int], targets: Sequence[int], num_bytes: int) -> Iterator[Message]:
    """What goes from one device to another."""
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            # In units of 1 / (both degrees), so that equal shares are equal.
            low = max(i * len(targets), j * len(sources))
            high = min((i + 1) * len(targets), (j + 1) * len(sources))
            if source != target and high > low:
                share = (high - low) / (len(sources) * len(targets))
                yield Message(source=source, target=target, num_bytes=share * num_bytes)
