"""The transports, one line each. To add one, write a class that keeps ``Transport``'s promises and name it here."""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.ranks.pipeline.transports.distributed import DistributedTransport
from mosaic.ranks.pipeline.transports.in_process import InProcessTransport
from mosaic.ranks.pipeline.transports.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """A way for ranks to reach each other."""

    name: str
    """As people give it."""
    phrase: str
    """What ranks are, and what carries their messages."""
    transport: type[Transport]
    """One rank's."""


_ALL = (
    TransportKind(
        name="distributed",
        phrase="processes, by torch.distributed: NCCL on GPUs, gloo on CPUs",
        transport=DistributedTransport,
    ),
    TransportKind(
        name="in_process", phrase="threads of one process, on one device or the CPU", transport=InProcessTransport
    ),
)

TRANSPORTS = {kind.name: kind for kind in _ALL}
"""By name."""
