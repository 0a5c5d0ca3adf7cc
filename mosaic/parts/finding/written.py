"""Writes into memory that outlives a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.seen_call import SeenCall, caller, tensors_in


class OwnedMemory:
    """The memory of parameters, buffers and the sample.

    Args:
        parameters: The model's parameters by name.
        buffers: The model's buffers by name.
        sample: A microbatch.
    """

    def __init__(
        self, *, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], sample: Mapping[str, Any]
    ) -> None:
        self._parameters = {_memory(tensor): name for name, tensor in parameters.items()}
        self._buffers = {_memory(tensor): name for name, tensor in buffers.items()}
        self._inputs = {_memory(tensor): name for name, value in sample.items() for tensor in tensors_in(value)}

    def check_written(self, tensors: Sequence[torch.Tensor], here: SeenCall | None) -> set[str]:
        """Returns the inputs among tensors of a write.

        A module may write into its own buffers, because it runs on one rank.

        Raises:
            UnsplittableError: A tensor is a parameter, or a buffer that others may read.
        """
        inputs = set()
        for memory in map(_memory, tensors):
            if memory in self._parameters:
                raise UnsplittableError(
                    f"parameter {self._parameters[memory]} is written into at {caller()}; ranks without its layer have "
                    "no memory for it: let the loop change it, behind the optimizer's step"
                )
            name = self._buffers.get(memory)
            if name is not None and (here is None or not name.startswith(f"{here.path}.")):
                raise UnsplittableError(
                    f"buffer {name} is written into at {caller()}, outside of the layer or module that holds it; other "
                    "ranks would not see it: let that module write it, or the loop behind the step"
                )
            if memory in self._inputs:
                inputs.add(self._inputs[memory])
        return inputs


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
