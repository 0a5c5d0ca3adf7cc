"""A function of the user's around their model, run by all ranks in a pipeline: the loss in steps, scores without.

The function and the model are one module to ``mosaic.pipeline``, called with the tensors of a batch by name. So neither
the model nor ``loss(model, batch)`` has to know of pipelines, and names in checkpoints are the model's own.
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
from mosaic.pipelining.kept_way import KeptWay
from mosaic.pipelining.order.search import OrderLimits
from mosaic.pipelining.planner import PlannerOptions
from mosaic.train.data.seeds import generators_of

COUNTED = PlannerOptions(limits=OrderLimits(rollouts=1000))
"""How steps are planned: by counts, so that a start after a kill finds the same orders."""
ONE_CHAIN = PlannerOptions(partition="mixed-time", weights="with", limits=OrderLimits(effort=0.0))
"""How scoring is planned: whole micro-batches, one after the other."""
DRAW = "ranks run its layers in other orders and would draw other numbers: draw from torch's default generator"
_REST = "rest of the batch"

Columns = Mapping[str, Any]
"""By name what ``score`` gives for each row."""


@dataclass(frozen=True, slots=True, repr=False)
class _Rest:
    """What a batch has beside its tensors."""

    leaves: tuple[Any, ...]
    names: tuple[str | None, ...]
    """For each leaf the tensor that stands there."""
    tree: Any
    index: int
    """Of the micro-batch in its step."""

    def __repr__(self) -> str:
        return str(self.tree)  # names shapes that are known, which values do not change

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
    """A model that trains in a pipeline; every rank makes the same calls.

    Args:
        model: With all weights, on this rank's device; those of other ranks are given up.
        loss: Runs the model on a batch.
        batches: Those of a step, for which it is planned.
        way: What an earlier start chose; None: planned, tried and chosen now.
        memory_bytes: Of a rank's device; 0: what a GPU has, and no limit on CPUs.

    Raises:
        MosaicError: The model or its loss cannot be cut over these ranks; says where and why.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Any],
        *,
        way: KeptWay | None,
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
    def way(self) -> KeptWay:
        """What runs."""
        return self._pipe.kept_way

    def describe(self) -> str:
        """Says what runs, and why."""
        return self._pipe.describe()

    def add_gradients(self, batches: Sequence[Any], scaler: torch.amp.GradScaler | None) -> list[Tensor]:
        """Goes forward and backward with the micro-batches of a step; returns the loss of each, on every rank."""
        before = python_state()
        losses = self._pipe.step(_microbatches(batches), scaler=scaler)
        if not before.is_same(python_state()):
            raise MosaicError(f"the model or its loss draws random numbers from Python or NumPy; {DRAW}")
        return list(losses)

    def remove(self) -> None:
        """Leaves the other ranks; the model keeps the weights that are here."""
        self._pipe.remove(gather=False)

    def _plan_name(self) -> str:
        return "pipeline"


class PipelinedScores:
    """Scores of a model in a pipeline; every rank makes the same calls.

    Args:
        model: With all weights, on this rank's device; those of other ranks are given up at the first batch.
        score: Runs the model on a batch.
        micro_batches: Into how many a batch is cut.
        memory_bytes: Of a rank's device; 0: what a GPU has, and no limit on CPUs.
    """

    def __init__(
        self, model: nn.Module, score: Callable[[nn.Module, Any], Columns], *, micro_batches: int, memory_bytes: int
    ) -> None:
        self.model = model
        self.micro_batches = micro_batches
        self._score = score
        self._memory_bytes = memory_bytes
        self._pipe: Any = None
        self._found: dict[int, dict[str, Any]] = {}

    def scores(self, batches: Sequence[Any]) -> list[Columns]:
        """Scores micro-batches, the model being in evaluation mode; every rank gets all columns, as lists.

        Raises:
            MosaicError: The model or its scores cannot be cut over these ranks; says why.
        """
        if self._pipe is None:
            self._begin(batches)
        self._found.clear()
        self._pipe.evaluate(_microbatches(batches))
        told = {at: columns for found in self._pipe.world.all_gather(self._found) for at, columns in found.items()}
        return [told[at] for at in range(len(batches))]

    def remove(self) -> None:
        """Leaves the other ranks."""
        if self._pipe is not None:
            self._pipe.remove(gather=False)

    def _begin(self, batches: Sequence[Any]) -> None:
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)  # a rank needs room for weights alone
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
        (found,) = self.scores([first])
        for name, column in expected.items():
            if not _alike(column, found.get(name)):
                raise MosaicError(
                    f"score gives other values of {name!r} in a pipeline than on one device; compute it from what the "
                    "model returns, or from the batch"
                )

    def _note(self, output: Columns, microbatch: Mapping[str, Any]) -> Tensor:
        """Keeps what the last rank has computed; in the place of a loss."""
        self._found[microbatch[_REST].index] = _as_lists(output)
        return torch.zeros(())


def _checked(loss: Any, microbatch: Mapping[str, Any]) -> Tensor:
    """Returns what ``loss`` gave.

    Raises:
        MosaicError: It is no scalar.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise MosaicError(f"loss returned a {type(loss).__name__}{shape}; return a scalar, the mean over the rows")
    return loss


def _microbatches(batches: Sequence[Any]) -> list[dict[str, Any]]:
    return [_microbatch(batch, index) for index, batch in enumerate(batches)]


def _microbatch(batch: Any, index: int) -> dict[str, Any]:
    """Returns a batch as keyword arguments: its tensors by name, and the rest of it."""
    pairs, tree = pytree.tree_flatten_with_path(batch)
    names = tuple(_name(path) if isinstance(leaf, Tensor) else None for path, leaf in pairs)
    tensors = {name: leaf for name, (_, leaf) in zip(names, pairs, strict=True) if name is not None}
    others = tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in pairs)
    return {**tensors, _REST: _Rest(leaves=others, names=names, tree=tree, index=index)}


def _sample(batches: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns micro-batches, first the one with most tensors: by it the model is cut."""
    return _microbatches(sorted(batches, key=_num_tensors, reverse=True))


def _num_tensors(batch: Any) -> int:
    return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(batch))


def _name(path: tuple[Any, ...]) -> str:
    """Names a tensor of a batch as people do, such as ``image``; one within others as Python does."""
    if len(path) == 1 and isinstance(path[0], pytree.MappingKey) and isinstance(path[0].key, str):
        return path[0].key
    return f"batch{pytree.keystr(path)}"


def _as_lists(columns: Columns) -> dict[str, Any]:
    return {name: column.tolist() if hasattr(column, "tolist") else column for name, column in columns.items()}


def _alike(expected: Any, found: Any) -> bool:
    try:
        one, other = torch.as_tensor(expected, dtype=torch.float64), torch.as_tensor(found, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):  # texts, for instance
        return bool(expected == found)
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
