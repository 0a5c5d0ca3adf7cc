"""A user's ``loss`` or ``score`` function and model, run by all ranks in a pipeline.

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
from mosaic.checkpoint.methods import KeptModel
from mosaic.errors import InfeasibleError, MosaicError, UnsplittableError
from mosaic.find.random_numbers import forked, python_state
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.plan import PipelinePlan
from mosaic.pipelining.planner import PlannerOptions
from mosaic.train.data.seeds import generators_of

COUNTED = PlannerOptions(limits=OrderLimits(rollouts=1000))
"""Planner options of steps: limits by counts, so a restart finds the same orders."""
ONE_CHAIN = PlannerOptions(partition="mixed-time", weights="with", limits=OrderLimits(effort=0.0))
"""Planner options of scoring: whole micro-batches, one after the other."""
DRAW = "ranks run its layers in other orders and would draw other numbers: draw from torch's default generator"
_REST = "rest of the batch"

Columns = Mapping[str, Any]
"""Columns of ``score`` by name, one entry per row."""


@dataclass(frozen=True, slots=True, repr=False)
class _Rest:
    """A batch without its tensors."""

    leaves: tuple[Any, ...]
    names: tuple[str | None, ...]
    """Name of the tensor at each leaf."""
    tree: Any
    index: int
    """Index of the micro-batch in its step."""

    def __repr__(self) -> str:
        return str(self.tree)  # identifies the shapes, so it must not depend on values

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Any:
        pairs = zip(self.leaves, self.names, strict=True)
        return pytree.tree_unflatten([leaf if name is None else tensors[name] for leaf, name in pairs], self.tree)


class _Called(nn.Module):
    """The user's function with their model, called with a batch's tensors."""

    def __init__(self, function: Callable[[nn.Module, Any], Any], model: nn.Module) -> None:
        super().__init__()
        self._function = function
        self.model = model

    def forward(self, **batch: Any) -> Any:
        rest: _Rest = batch.pop(_REST)
        return self._function(self.model, rest.with_tensors(batch))


class PipelinedModel(KeptModel):
    """A model that trains in a pipeline; every rank makes the same calls, and keeps the weights of its own layers.

    ``way`` is the choice of an earlier start; None plans and tries now.

    Raises:
        MosaicError: The model or its loss cannot be cut over these ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Any],
        *,
        way: PipelinePlan | None,
        memory_bytes: int,
    ) -> None:
        if generators_of(model):
            raise UnsplittableError(f"the model has random generators of its own; {DRAW}")
        try:
            self._pipe = mosaic.pipeline(
                _Called(loss, model),
                _sample(batches),
                loss=_checked,
                plan=way,
                options=COUNTED,
                memory_bytes=memory_bytes,
                trial=way is None,
            )
        except (UnsplittableError, InfeasibleError, ValueError) as error:
            raise MosaicError(f"{error}; or set pipeline = false in [budget]") from error
        super().__init__(model, self._pipe.world)
        self.model = model

    @property
    def way(self) -> PipelinePlan:
        return self._pipe.plan

    def describe(self) -> str:
        return self._pipe.describe()

    def add_gradients(self, batches: Sequence[Any], scaler: torch.amp.GradScaler | None) -> list[Tensor]:
        """Runs forward and backward of a step's micro-batches; returns the loss of each, on every rank."""
        before = python_state()
        losses = self._pipe.step(_microbatches(batches), scaler=scaler)
        if not before.is_same(python_state()):
            raise MosaicError(f"the model or its loss draws random numbers from Python or NumPy; {DRAW}")
        return list(losses)

    def remove(self) -> None:
        self._pipe.remove(gather=False)

    def _plan_name(self) -> str:
        return "pipeline"


class PipelinedScores:
    """Scores of a model in a pipeline; every rank makes the same calls.

    Args:
        model: A model with all weights, on this rank's device; it loses the weights of other ranks at the first batch.
        score: Runs the model on a batch.
        micro_batches: Micro-batches of a batch.
        memory_bytes: Memory of a rank's device; 0: all of a GPU's, and no limit on CPUs.
    """

    def __init__(
        self, model: nn.Module, score: Callable[[nn.Module, Any], Columns], *, micro_batches: int, memory_bytes: int
    ) -> None:
        self.model = model
        self.micro_batches = micro_batches
        self._score = score
        self._memory_bytes = memory_bytes
        self._pipe: Any = None
        self._columns: dict[int, dict[str, Any]] = {}

    def scores(self, batches: Sequence[Any]) -> list[Columns]:
        """Scores micro-batches in evaluation mode; every rank gets all columns, as lists.

        Raises:
            MosaicError: The model or its scores cannot be cut over these ranks.
        """
        if self._pipe is None:
            self._begin(batches)
        self._columns.clear()
        self._pipe.evaluate(_microbatches(batches))
        gathered = {at: columns for part in self._pipe.world.all_gather(self._columns) for at, columns in part.items()}
        return [gathered[at] for at in range(len(batches))]

    def remove(self) -> None:
        if self._pipe is not None:
            self._pipe.remove(gather=False)

    def _begin(self, batches: Sequence[Any]) -> None:
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)  # saves the memory of gradients
        first = max(batches, key=_num_tensors)
        with torch.no_grad(), forked(next(self.model.parameters()).device):
            expected = _as_lists(self._score(self.model, first))
        self._pipe = mosaic.pipeline(
            _Called(self._score, self.model),
            _sample(batches),
            loss=self._note,
            options=ONE_CHAIN,
            memory_bytes=self._memory_bytes,
            trial=False,
        )
        (columns,) = self.scores([first])
        for name, column in expected.items():
            if not _alike(column, columns.get(name)):
                raise MosaicError(
                    f"score gives other values of {name!r} in a pipeline than on one device; compute it from what the "
                    "model returns, or from the batch"
                )

    def _note(self, output: Columns, microbatch: Mapping[str, Any]) -> Tensor:
        """Stores the scores of the last rank; stands for a loss."""
        self._columns[microbatch[_REST].index] = _as_lists(output)
        return torch.zeros(())


def _checked(loss: Any, microbatch: Mapping[str, Any]) -> Tensor:
    """Returns the loss.

    Raises:
        MosaicError: It is not a scalar.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise MosaicError(f"loss returned a {type(loss).__name__}{shape}; return a scalar, the mean over the rows")
    return loss


def _microbatches(batches: Sequence[Any]) -> list[dict[str, Any]]:
    return [_microbatch(batch, index) for index, batch in enumerate(batches)]


def _microbatch(batch: Any, index: int) -> dict[str, Any]:
    """Returns a batch as keyword arguments: its tensors by name, and a ``_Rest``."""
    pairs, tree = pytree.tree_flatten_with_path(batch)
    names = tuple(_name(path) if isinstance(leaf, Tensor) else None for path, leaf in pairs)
    tensors = {name: leaf for name, (_, leaf) in zip(names, pairs, strict=True) if name is not None}
    others = tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in pairs)
    return {**tensors, _REST: _Rest(leaves=others, names=names, tree=tree, index=index)}


def _sample(batches: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns micro-batches; the first has the most tensors, and the cut of the model follows it."""
    return _microbatches(sorted(batches, key=_num_tensors, reverse=True))


def _num_tensors(batch: Any) -> int:
    return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(batch))


def _name(path: tuple[Any, ...]) -> str:
    """Names a tensor of a batch: ``image`` at the top level, else as in Python."""
    if len(path) == 1 and isinstance(path[0], pytree.MappingKey) and isinstance(path[0].key, str):
        return path[0].key
    return f"batch{pytree.keystr(path)}"


def _as_lists(columns: Columns) -> dict[str, Any]:
    return {name: column.tolist() if hasattr(column, "tolist") else column for name, column in columns.items()}


def _alike(expected: Any, actual: Any) -> bool:
    try:
        left, right = torch.as_tensor(expected, dtype=torch.float64), torch.as_tensor(actual, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):  # texts, for instance
        return bool(expected == actual)
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-3, atol=1e-5, equal_nan=True)
