"""A user's ``loss`` function and model, run by all ranks in a pipeline.

``mosaic.pipeline`` sees the function and the model as one module, which it calls with the tensors of a batch by name.
Users' code therefore needs no change for pipelines, and checkpoints hold the model's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import mosaic
from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.errors import InfeasibleError, MosaicError, UnsplittableError
from mosaic.find.random_numbers import python_state
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.plan import PipelinePlan
from mosaic.pipelining.planner import PlannerOptions
from mosaic.retrain.worker.positions import generators_of

COUNTED = PlannerOptions(limits=OrderLimits(rollouts=1000))
"""Planner options of steps: limits by counts, so a restart finds the same orders."""
DRAW = "ranks run its layers in other orders and would draw other numbers: draw from torch's default generator"
_REST = "rest of the batch"


@dataclass(frozen=True, slots=True, repr=False)
class _Rest:
    """A batch without its tensors."""

    leaves: tuple[Any, ...]
    names: tuple[str | None, ...]
    """Name of the tensor at each leaf."""
    tree: Any

    def __repr__(self) -> str:
        return str(self.tree)  # identifies the shapes, so it must not depend on values

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Any:
        pairs = zip(self.leaves, self.names, strict=True)
        return pytree.tree_unflatten([leaf if name is None else tensors[name] for leaf, name in pairs], self.tree)


class _ModelWithLoss(nn.Module):
    def __init__(self, loss: Callable[[nn.Module, Any], Any], model: nn.Module) -> None:
        super().__init__()
        self._loss = loss
        self.model = model

    def forward(self, **batch: Any) -> Any:
        rest: _Rest = batch.pop(_REST)
        return self._loss(self.model, rest.with_tensors(batch))


class PipelinedModel(Checkpointer):
    """A model that trains in a pipeline; every rank makes the same calls, and keeps the weights of its own layers.

    ``plan`` is the choice of an earlier start; None plans and tries now.

    Raises:
        MosaicError: The model or its loss cannot be cut over these ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Any],
        *,
        plan: PipelinePlan | None,
        memory_bytes: int,
    ) -> None:
        if generators_of(model):
            raise UnsplittableError(f"the model has random generators of its own; {DRAW}")
        # The cut of the model follows the first micro-batch.
        largest_first = sorted(batches, key=_num_tensors, reverse=True)
        try:
            self._pipe = mosaic.pipeline(
                _ModelWithLoss(loss, model),
                [_microbatch(batch) for batch in largest_first],
                loss=_checked,
                plan=plan,
                options=COUNTED,
                memory_bytes=memory_bytes,
                trial=plan is None,
            )
        except (UnsplittableError, InfeasibleError, ValueError) as error:
            raise MosaicError(f"{error}; or set pipeline = false in [budget]") from error
        super().__init__(model, self._pipe.world)
        self.model = model

    @property
    def plan(self) -> PipelinePlan:
        return self._pipe.plan

    def describe(self) -> str:
        return self._pipe.describe()

    def add_gradients(self, batches: Sequence[Any], scaler: torch.amp.GradScaler | None) -> list[Tensor]:
        """Runs forward and backward of a step's micro-batches; returns the loss of each, on every rank."""
        before = python_state()
        losses = self._pipe.step([_microbatch(batch) for batch in batches], scaler=scaler)
        if not before.is_same(python_state()):
            raise MosaicError(f"the model or its loss draws random numbers from Python or NumPy; {DRAW}")
        return list(losses)

    def remove(self) -> None:
        self._pipe.remove(gather=False)

    def _plan_name(self) -> str:
        return "pipeline"


def _checked(loss: Any, microbatch: Mapping[str, Any]) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise MosaicError(f"loss returned a {type(loss).__name__}{shape}; return a scalar, the mean over the rows")
    return loss


def _microbatch(batch: Any) -> dict[str, Any]:
    """Returns a batch as keyword arguments: its tensors by name, and a ``_Rest``."""
    pairs, tree = pytree.tree_flatten_with_path(batch)
    names = tuple(_name(path) if isinstance(leaf, Tensor) else None for path, leaf in pairs)
    tensors = {name: leaf for name, (_, leaf) in zip(names, pairs, strict=True) if name is not None}
    others = tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in pairs)
    return {**tensors, _REST: _Rest(leaves=others, names=names, tree=tree)}


def _num_tensors(batch: Any) -> int:
    return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(batch))


def _name(path: tuple[Any, ...]) -> str:
    """Names a tensor of a batch: ``image`` at the top level, else as in Python."""
    if len(path) == 1 and isinstance(path[0], pytree.MappingKey) and isinstance(path[0].key, str):
        return path[0].key
    return f"batch{pytree.keystr(path)}"
