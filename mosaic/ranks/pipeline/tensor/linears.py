"""Linear modules of which each tensor rank has a slice; DTensor carries what crosses ranks, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from mosaic.ranks.pipeline.tensor.styles import COLWISE

Forward = Callable[[nn.Linear, Tensor], Tensor]
"""Of a linear module with its input."""


def split_linear(linear: nn.Linear, style: str, mesh: DeviceMesh) -> None:
    """Makes a linear module, whose weights are slices already, compute its share; hooks and names stay.

    Its class is swapped, so that copies of the model compute with their own weights.
    """
    forward = _by_outputs(mesh) if style == COLWISE else _by_inputs(mesh)
    linear.__class__ = type(f"{style.capitalize()}Linear", (nn.Linear,), {"forward": forward})


def _by_outputs(mesh: DeviceMesh) -> Forward:
    """Takes the whole input, gives this rank's features; the input's gradient is summed over ranks."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:  # as nn.Linear has it
        given = DTensor.from_local(input, mesh, [Replicate()], run_check=False)
        return functional.linear(given.to_local(grad_placements=[Partial()]), self.weight, self.bias)

    return forward


def _by_inputs(mesh: DeviceMesh) -> Forward:
    """Takes this rank's features, gives the whole output, summed over ranks; the bias is added once."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:  # as nn.Linear has it
        made = DTensor.from_local(functional.linear(input, self.weight), mesh, [Partial()], run_check=False)
        whole = made.redistribute(placements=[Replicate()]).to_local()
        return whole if self.bias is None else whole + self.bias

    return forward
