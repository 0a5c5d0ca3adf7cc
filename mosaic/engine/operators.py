"""Operators on lane tensors: queued on the lane of their branch, or run where they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.lane_tensor import LaneTensor, lane_tensors
from mosaic.engine.structure import flatten, map_tensors, unflatten
from mosaic.errors import ModuleContractError

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket
    from mosaic.engine.executor import Executor

_ON_MAIN = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
)


class Operators:
    """Decides for one executor where an operator runs."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def run(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operator that has lane tensors among its arguments.

        It is queued on the lane of the first of them and answered by lane tensors, unless it needs a value, draws
        random numbers or writes into something else than this lane's tensors: then it runs here, once its inputs
        are there.
        """
        if (
            self._executor.closed
            or not _ON_MAIN.isdisjoint(func.tags)
            or not _writes_only(func, args, kwargs, first._lane)
        ):
            return self._run_here(func, args, kwargs)
        stands_for: dict[int, torch.Tensor] = {}
        try:
            likes = func(*_to_meta(args, stands_for), **_to_meta({**kwargs, **_device(kwargs)}, stands_for))
        except Exception:  # no shape function, or shapes that do not fit: the real operator says what is wrong
            return self._run_here(func, args, kwargs)
        leaves, spec = flatten(likes)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return self._run_here(func, args, kwargs)
        ticket = self._queue(first, func, args, kwargs)
        made = [
            stands_for.get(id(leaf))
            if id(leaf) in stands_for
            else LaneTensor(leaf, self._executor, first._lane, ticket, index, first._module)
            for index, leaf in enumerate(leaves)
        ]
        if _is_view(func) and len(leaves) == 1 and isinstance(made[0], LaneTensor) and args[0] is first:
            made[0].note_view(first, lambda base: func(base, *args[1:], **kwargs))
        return unflatten(list(made), spec)

    def _queue(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Ticket[list[torch.Tensor]]:
        executor, lane = self._executor, first._lane
        found = list(lane_tensors((args, kwargs)))
        real = _real_tensors((args, kwargs))
        versions = [value._version for value in real]
        for value in real:
            if value.is_leaf and value.requires_grad:
                executor.gradients.expect(value)

        def work() -> list[torch.Tensor]:
            with torch.no_grad():
                result = func(*_values(args), **_values(kwargs))
            if versions != [value._version for value in real]:
                raise ModuleContractError(
                    f"an input of {func}, which follows {first._module!r} on its lane, was written to before the lane "
                    "had read it; write to a copy"
                )
            return [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]

        ticket = executor.submit_to(lane, first._module, "glue", work, executor.inputs_from(found, lane))
        if func._schema.is_mutable:
            executor.last_write[lane] = ticket
        return ticket

    def _run_here(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable:
            self._executor.drain()
        stands_for = {id(tensor.value()): tensor for tensor in lane_tensors((args, kwargs))}
        result = func(*_values(args), **_values(kwargs))
        return map_tensors(lambda tensor: stands_for.get(id(tensor), tensor), result)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _values(value: Any) -> Any:
    return map_tensors(lambda t: t.value() if isinstance(t, LaneTensor) else t, value)


def _real_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor) and not isinstance(leaf, LaneTensor)]


def _to_meta(value: Any, stands_for: dict[int, torch.Tensor]) -> Any:
    """Replaces tensors by tensors without values, noting which stands for which."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        stands_for[id(made)] = tensor
        return made

    return map_tensors(like, value)


def _writes_only(func: Any, args: Any, kwargs: Any, lane: Lane) -> bool:
    """Whether an operator writes into nothing but tensors of one lane."""
    if not func._schema.is_mutable:
        return True
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[index] if index < len(args) else kwargs.get(argument.name)
            if not isinstance(written, LaneTensor) or written._lane is not lane:
                return False
    return True


def _device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
