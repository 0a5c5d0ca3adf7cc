"""Results that go straight from the ranks of one module to those of another: what stands for them in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.host.lane_tensor import HOOKS, LaneTensor, Ready, operator_name, reads_metadata
from mosaic.errors import ModuleContractError

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket
    from mosaic.engine.host.executor import Executor


class StraightTensor(LaneTensor):
    """Stands for this rank's rows of a result that does not come home.

    It has their shape. Its value is what this rank has of the result as a member of the module that made it: other
    rows, and another number of them, so that nobody but the module that takes it may see it.
    """

    _target: str

    def goes(self, source: str, target: str) -> bool:
        """Whether it goes from one module to another."""
        return (self._module, self._target) == (source, target)

    def join(self) -> torch.Tensor:
        """Raises ModuleContractError: this rank has other rows."""
        raise self.refusal("the loop")

    def refusal(self, what: str) -> ModuleContractError:
        """Returns the error for a use that the sample's step did not make."""
        source, target = self._module, self._target
        return ModuleContractError(
            f"{what} reads a result of {source!r}, which this rank does not have: it goes straight to the ranks of "
            f"{target!r}, since in the sample's step nothing else used it; colocate with a sample whose step uses it "
            f"as this one does, or with colocate(..., direct=False), or leave the module where it is called: "
            f"colocate(..., exclude=[{target!r}])"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reads a shape and the like, and refuses anything else."""
        kwargs = kwargs or {}
        if reads_metadata(func) and operator_name(func) not in HOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.empty_like:  # of its shape, too
            return torch.empty(args[0].shape, **{"dtype": args[0].dtype, "device": args[0].device, **kwargs})
        raise _first((args, kwargs)).refusal(operator_name(func) or str(func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with func first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses what reached an operator by another way."""
        raise _first((args, kwargs or {})).refusal(str(func))


def _first(value: Any) -> StraightTensor:
    return next(leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, StraightTensor))


def standing_for(
    like: torch.Tensor, executor: Executor, lane: Lane, ticket: Ticket[Any], pick: int, ends: tuple[str, str]
) -> StraightTensor:
    """Returns what stands for a result.

    Args:
        like: Has the shape of this rank's own rows.
        executor: The engine, and
        lane: its lane, on which
        ticket: the work is done that makes the result
        pick: of that place.
        ends: The module that makes it and the one that takes it.
    """
    made = StraightTensor(like, executor, lane, ticket, pick, ends[0])
    made._target = ends[1]
    return made


class Kept(torch.autograd.Function):
    """From a result in the caller's own graph to what stands for it; and a gradient, which stands for one, back."""

    @staticmethod
    def forward(ctx: Any, stand: Callable[[torch.Tensor], StraightTensor], result: torch.Tensor) -> Any:
        """Returns what ``stand`` makes of the result's value."""
        ctx.set_materialize_grads(False)
        return stand(result.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns the gradient of the rows that this rank has as a member."""
        (grad,) = grads
        return None, grad.value() if isinstance(grad, LaneTensor) else grad


class Opened(torch.autograd.Function):
    """The other way, for a module that takes it in the caller's own graph."""

    @staticmethod
    def forward(ctx: Any, tensor: StraightTensor) -> torch.Tensor:
        """Returns the value."""
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        ctx.place = (like, tensor._executor, tensor._lane, tensor._module)
        return tensor.value().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns what stands for the gradient."""
        like, executor, lane, module = ctx.place
        return LaneTensor(like, executor, lane, Ready([grads[0]]), 0, module)


def opened(leaf: Any) -> Any:
    """Returns what stands for a result as the rows that this rank has of it, and anything else as it is."""
    return Opened.apply(leaf) if isinstance(leaf, StraightTensor) else leaf
