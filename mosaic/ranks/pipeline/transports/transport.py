"""How ranks of a pipeline reach each other: what every transport does, whatever carries its bytes.

A channel is a pair of ranks, a lane of each, a sense, and a direction (activations go forward, gradients backward). Its
messages arrive in the order in which they were posted, so both ends post them in one order; those of other lanes may
come before or after. Lanes may post and wait at the same time, each on a thread of its own. Posting never waits, and no
more may be taken for granted than that either end is done once both are posted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from mosaic.errors import ModuleContractError
from mosaic.ranks.world.progress import RankProgress, SentPhase

Tensors = tuple[torch.Tensor, ...]
"""What one task hands to another."""
LanePair = tuple[int, int]
"""A lane of the sender and one of the receiver, each counted from 0 on its rank."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a message; ``str`` gives ``float32[3, 4]``."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its type."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Reads it off a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Message:
    """One message, as this rank sees it."""

    name: str
    """Its edge, ``2F0>5F0``."""
    peer: int
    """The rank at its other end."""
    is_forward: bool
    """Its direction."""
    specs: tuple[TensorSpec, ...]
    """What it carries, known to both ends beforehand."""
    lanes: LanePair = (0, 0)
    """Whose it is at its two ends."""

    @property
    def phase(self) -> SentPhase:
        """Its direction, as progress has it."""
        return "forward" if self.is_forward else "backward"

    def check(self, tensors: Tensors) -> None:
        """Raises ModuleContractError unless these are what it carries: gloo takes shorter messages without a word."""
        if len(tensors) == len(self.specs):
            for spec, tensor in zip(self.specs, tensors, strict=True):
                if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                    break
            else:
                return
        made, planned = (", ".join(map(str, each)) or "nothing" for each in (map(TensorSpec.of, tensors), self.specs))
        raise ModuleContractError(
            f"{self.name} is planned to carry {planned}, and {made} was made; both ranks have to know shapes and types "
            "beforehand: plan the step with the microbatches that it has"
        )


class Handle(Protocol):
    """One end of a message under way."""

    def wait(self) -> Tensors:
        """Returns what was received, or nothing of what was sent, once it is there.

        Raises:
            RankFailedError: Another rank has failed, or is gone.
        """


class Transport(Protocol):
    """How one rank reaches the others.

    Attributes:
        rank: This one.
        size: How many there are.
        progress: Where this one is.
    """

    rank: int
    size: int
    progress: RankProgress

    def open_lanes(self, pairs: Iterable[LanePair]) -> None:
        """Makes what messages between such lanes need to pass by each other; all ranks call it with the same pairs."""

    def post_send(self, message: Message, tensors: Tensors) -> Handle:
        """Begins to send.

        Raises:
            ModuleContractError: The tensors are not what the message carries.
            BackendUnavailableError: The transport carries no tensors of that device.
            RankFailedError: Another rank has failed, or is gone.
        """

    def post_receive(self, message: Message) -> Handle:
        """Makes room for a message.

        Raises:
            RankFailedError: Another rank has failed, or is gone.
        """

    def tell(self, text: str) -> tuple[str, ...]:
        """Returns what each rank told; all of them call it.

        Raises:
            RankFailedError: Another rank has failed, or is gone.
        """

    def abort(self, why: str) -> None:
        """Has all ranks end what they wait for with RankFailedError, ``rank 1 {why}``; the first to say why is heard.

        No message goes through the transport afterwards.
        """

    def close(self) -> None:
        """Leaves the others; nothing of this rank may be under way."""
