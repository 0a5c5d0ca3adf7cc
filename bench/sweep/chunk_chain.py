"""A microbatch through all chunks of a model, one after the other in one process, and back through their boundaries."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mosaic.find.random_numbers import RandomState, random_state
from mosaic.graph import Part
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.split import ModelSplit

Tensors = tuple[Tensor, ...]
_CPU = torch.device("cpu")


class ChunkChain:
    """Each chunk on a rank of its own: copies of the model that hold the weights of one chunk.

    Args:
        model: The plain one.
        split: Where it can be cut.
        chunks: Of a partition, in order.
    """

    def __init__(self, model: nn.Module, split: ModelSplit, chunks: Sequence[tuple[Part, ...]]) -> None:
        self._split = split
        self._chunks = chunks
        self._ranks = [PartedModel(copy.deepcopy(model), split, chunks, own=[i]) for i in range(len(chunks))]

    def step(self, kwargs: Mapping[str, Any], loss: Callable[[Any], Tensor], *, strategy: str = "keep") -> Tensor:
        """Runs forwards and backwards as the pipeline does; gradients add up in the ranks' parameters.

        Args:
            kwargs: A microbatch.
            loss: Of the model's output.
            strategy: What becomes of all layers' activations.

        Raises:
            AssertionError: A rank expects other shapes than another sends.
        """
        tape: list[tuple[int, Tensors, Tensors]] = []  # who sent what, and the same as its receiver has it
        senders: dict[str, int] = {}
        made: dict[str, Tensors] = {}
        state = random_state(_CPU)
        found: Any = None
        for index, rank in enumerate(self._ranks):
            chunk = self._chunks[index]
            received = {name: tuple(map(_leaf, made[name])) for name in self._split.entries(chunk)}
            tape += [(senders[name], made[name], leaves) for name, leaves in received.items()]
            _draw_elsewhere(index)
            state.restore()
            layers = sum(part.count for part in chunk)
            found = rank.forward(index, kwargs, received, [strategy] * layers, draws="all")
            if index < len(self._ranks) - 1:
                self._check_shapes(index, kwargs, found)
                made |= found
                senders |= dict.fromkeys(found, index)
        result = loss(found)
        result.backward()
        for index in reversed(range(len(self._ranks) - 1)):
            pairs = [pair for sender, *both in tape if sender == index for pair in zip(*both, strict=True)]
            due = [(one, leaf.grad) for one, leaf in pairs if leaf.grad is not None]
            if due:
                torch.autograd.backward([one for one, _ in due], [grad for _, grad in due])
        return result.detach()

    def state_after(self, kwargs: Mapping[str, Any]) -> RandomState:
        """Returns the generators' state that each rank sees behind a microbatch, from the present one on.

        Raises:
            AssertionError: Ranks see different ones.
        """
        before = random_state(_CPU)
        states = []
        for index, rank in enumerate(self._ranks):
            _draw_elsewhere(index)
            before.restore()
            rank.skip_random_numbers(kwargs)
            states.append(random_state(_CPU))
        assert all(state.is_same(states[0]) for state in states), "ranks draw different numbers"
        return states[0]

    def gradients(self) -> dict[str, Tensor]:
        """Returns gradients by parameter, summed over ranks."""
        found: dict[str, Tensor] = {}
        for index, rank in enumerate(self._ranks):
            for name, parameter in rank.own_parameters(index).items():
                if parameter.grad is not None:
                    found[name] = found[name] + parameter.grad if name in found else parameter.grad
        return found

    def _check_shapes(self, index: int, kwargs: Mapping[str, Any], sent: Mapping[str, Tensors]) -> None:
        told = self._ranks[(index + 1) % len(self._ranks)].boundary_like(index, kwargs)
        assert _shapes(told) == _shapes(sent), f"chunk {index} sends {_shapes(sent)}, others expect {_shapes(told)}"


def _shapes(tensors: Mapping[str, Tensors]) -> dict[str, list[Any]]:
    return {name: [(tuple(one.shape), one.dtype) for one in found] for name, found in tensors.items()}


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _draw_elsewhere(seed: int) -> None:
    """Leaves all generators as no other rank has them."""
    torch.manual_seed(100 + seed)
    random.seed(100 + seed)
    np.random.seed(100 + seed)
