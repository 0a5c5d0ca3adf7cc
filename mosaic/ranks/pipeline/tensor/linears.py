"""Linear modules of which each tensor rank has a slice; DTensor carries what crosses ranks, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from mosaic.ranks.pipeline.tensor.styles import COLWISE

Forward = Callable[[nn.Linear, Tensor], Tensor]
"""Of a linear module with its input."""


@dataclass(slots=True, kw_only=True)
class SharedInput:
    """The input of several modules beside each other, such as queries, keys and values: its gradient is summed once."""

    mesh: DeviceMesh
    """The ranks that share the layer."""
    given: Tensor | None = None
    """The last input, until a module that is split by inputs has run."""
    entered: Tensor | None = None
    """What modules are given for it."""
    has_graph: bool = False
    """Whether that was made with gradients on."""

    def enter(self, given: Tensor) -> Tensor:
        """Returns an input whose gradient is the sum of those of all ranks."""
        if self.entered is None or self.given is not given or self.has_graph != torch.is_grad_enabled():
            whole = DTensor.from_local(given, self.mesh, [Replicate()], run_check=False)
            self.given, self.entered = given, whole.to_local(grad_placements=[Partial()])
            self.has_graph = torch.is_grad_enabled()
        return self.entered

    def leave(self, made: Tensor) -> Tensor:
        """Returns the sum of what all ranks made."""
        self.given = self.entered = None
        parts = DTensor.from_local(made, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()


def split_linear(linear: nn.Linear, style: str, shared: SharedInput) -> None:
    """Makes a linear module, whose weights are slices already, compute its share; hooks and names stay.

    Its class is swapped, so that copies of the model compute with their own weights.

    Args:
        linear: The module.
        style: ``colwise`` or ``rowwise``.
        shared: One for all modules of one parent.
    """
    forward = _by_outputs(shared) if style == COLWISE else _by_inputs(shared)
    linear.__class__ = type(f"{style.capitalize()}Linear", (nn.Linear,), {"forward": forward})


def _by_outputs(shared: SharedInput) -> Forward:
    """Takes the whole input, gives this rank's features."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        return functional.linear(shared.enter(input), self.weight, self.bias)

    return forward


def _by_inputs(shared: SharedInput) -> Forward:
    """Takes this rank's features, gives the whole output; the bias is added once."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        whole = shared.leave(functional.linear(input, self.weight))
        return whole if self.bias is None else whole + self.bias

    return forward
