"""What running tasks costs beside their layers and the network: the host's own time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Of one task or message.

    Raises:
        ValueError: One is negative.
    """

    task_ns: int = 0
    """What a forward takes beside its layers: the model's own Python around them."""
    post_ns: int = 0
    """What a task takes for each message that it sends or receives."""
    message_ns: int = 0
    """What a message takes on its way beside the network's description."""

    def __post_init__(self) -> None:
        if min(self.task_ns, self.post_ns, self.message_ns) < 0:
            raise ValueError(f"{self}; use 0 or more nanoseconds")


NO_HOST_TIMES = HostTimes()
