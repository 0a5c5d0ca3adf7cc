"""What an executor calls: the phases of chunks, with whatever autograd needs behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from mosaic.pipelining.schedule.action import TaskName
from mosaic.ranks.pipeline.transports.transport import Tensors, TensorSpec


class Edge(NamedTuple):
    """What one task hands to another; ``str`` gives ``2F0>5F0``."""

    source: TaskName
    """Who makes it."""
    target: TaskName
    """Whom it is for."""

    def __str__(self) -> str:
        return f"{self.source}>{self.target}"


class Work(Protocol):
    """The chunks of one rank in one step. Mappings are by the task at the other end of an edge.

    Tensors that leave take no part in any graph, and nobody writes to them until the executor has let go of them.
    """

    def forward(self, task: TaskName, inputs: Mapping[TaskName, Tensors]) -> Tensors | Mapping[TaskName, Tensors]:
        """Computes a forward.

        Args:
            task: Which.
            inputs: From each forward that feeds it, in the order of its arguments.

        Returns:
            What every forward that it feeds is given, or for each of them what it is given.
        """

    def backward(self, task: TaskName, gradients: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        """Computes a backward.

        Args:
            task: Which; ``2B0.1`` is the backward of ``2F0.1``.
            gradients: Of what its forward handed out, from each backward that has some; empty where the loss is its
                own.

        Returns:
            For each backward that waits for it the gradients of what that one's forward handed to this one's.
        """

    def weights(self, task: TaskName) -> None:
        """Computes a backward for weights that is a task of its own."""

    def free(self, task: TaskName) -> None:
        """Lets go of what a forward kept."""

    def reduce(self, chunk: int) -> None:
        """Sums the gradients of a chunk over its data-parallel ranks."""

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        """Returns shapes and types of what crosses an edge between ranks; both of them have to return the same."""
