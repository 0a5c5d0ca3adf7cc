"""Operators on lane tensors: queued on the lane of their branch, or run where they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from mosaic.engine.calls.shapes import ShapeTable
from mosaic.engine.calls.structure import map_tensors, tensors_of, version_of
from mosaic.engine.calls.torch_functions import written_arguments
from mosaic.engine.host.lane_tensor import LaneTensor, lane_of_backward, lane_tensors
from mosaic.errors import ModuleContractError

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket
    from mosaic.engine.host.gradients import LeafGradients
    from mosaic.engine.host.lane_work import LaneWork

_ON_MAIN = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
)


class Operators:
    """Decides for one executor where an operator runs."""

    def __init__(self, work: LaneWork, gradients: LeafGradients) -> None:
        self._work = work
        self._gradients = gradients
        self._shapes = ShapeTable()

    def run(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operator that has lane tensors among its arguments.

        It is queued on the lane of the first of them and answered by lane tensors, unless it needs a value, draws
        random numbers or writes into something else than this lane's tensors: then it runs here, once its inputs
        are there.
        """
        lane = self._lane(first, func)
        if self._work.closed or not _ON_MAIN.isdisjoint(func.tags) or not _writes_only(func, args, kwargs, lane):
            return self._run_here(func, args, kwargs)
        results = self._shapes.results(func, args, kwargs)
        if results is None:
            return self._run_here(func, args, kwargs)
        tensors = list(tensors_of((args, kwargs)))
        entry = self._queue(first, lane, func, args, kwargs, tensors, results.num_bytes)
        made = [
            tensors[leaf]
            if isinstance(leaf, int)
            else LaneTensor(leaf, first._executor, lane, entry, index, first._module)
            for index, leaf in enumerate(results.leaves)
        ]
        if _is_view(func) and len(made) == 1 and isinstance(made[0], LaneTensor) and args[0] is first:
            made[0].note_view(first, lambda base: func(base, *args[1:], **kwargs))
        return pytree.tree_unflatten(made, results.spec)

    def _lane(self, first: LaneTensor, func: Any) -> Lane:
        """Returns where an operator belongs: in backward the lane of its forward, else that of its first tensor.

        A gradient may come from another lane, where it would queue up behind other modules' backward.
        """
        if not func._schema.is_mutable:
            found = lane_of_backward()
            if found is not None and self._work.has(found):
                return found
        return first._lane

    def _queue(
        self,
        first: LaneTensor,
        lane: Lane,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        num_bytes: int,
    ) -> Ticket[list[torch.Tensor]]:
        real = [tensor for tensor in tensors if not isinstance(tensor, LaneTensor)]
        versions = [version_of(value) for value in real]
        for value in real:
            if value.is_leaf and value.requires_grad:
                self._gradients.expect(value)

        def work() -> list[torch.Tensor]:
            with torch.no_grad():
                result = func(*_values(args), **_values(kwargs))
            if versions != [version_of(value) for value in real]:
                raise ModuleContractError(
                    f"an input of {func}, which follows {first._module!r} on its lane, was written to before the lane "
                    "had read it; write to a copy"
                )
            return list(tensors_of(result))

        after = self._work.inputs_from((tensor for tensor in tensors if isinstance(tensor, LaneTensor)), lane)
        entry = self._work.batch(lane, first._module).add(work, after, num_bytes)
        if func._schema.is_mutable:
            self._work.last_write[lane] = entry
        return entry

    def _run_here(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable:
            self._work.drain()
        stands_for = {id(tensor.value()): tensor for tensor in lane_tensors((args, kwargs))}
        result = func(*_values(args), **_values(kwargs))
        return map_tensors(lambda tensor: stands_for.get(id(tensor), tensor), result)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _values(value: Any) -> Any:
    """Replaces the lane tensors in an operator's arguments by their values."""
    if isinstance(value, LaneTensor):
        return value.value()
    if type(value) in (list, tuple):
        return type(value)(_values(item) for item in value)
    if type(value) is dict:
        return {key: _values(item) for key, item in value.items()}
    return value


def _writes_only(func: Any, args: Any, kwargs: Any, lane: Lane) -> bool:
    """Whether an operator writes into nothing but tensors of one lane."""
    if not func._schema.is_mutable:
        return True
    return all(isinstance(t, LaneTensor) and t._lane is lane for t in written_arguments(func, args, kwargs))
