"""Functions of torch that an unchanged loop calls with one rank's gradients and means those of all ranks.

As long as a model is colocated over ranks, and for its parameters only:

* ``torch.nn.utils.clip_grad_norm_`` takes the norm over all ranks, whoever calls it and however it was imported;
  ``get_total_norm``, which is given no parameters to know whose gradients are missing, raises;
* ``torch.amp.GradScaler`` skips a step on all ranks if one of them has found an infinite gradient;
* wrapping the model in ``DistributedDataParallel`` gives a wrapper that reduces nothing: that is done already;
* ``model.to(device)`` leaves what this rank has given up as it is;
* an optimizer that steps all parameters as one (``LBFGS``), or spreads them over ranks itself
  (``ZeroRedundancyOptimizer``), raises where some are on other ranks;
* ``optimizer.state_dict()`` has a stand-in for the state that is on other ranks, so that saving it raises.

What is replaced is the function inside of torch's own, so that names that were imported before mean it too. It is put
back when the last such model is given back by ``handle.remove()``, or is gone.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mosaic.errors import ModuleContractError
from mosaic.ranks.parameters.elsewhere import Elsewhere
from mosaic.ranks.running.frameworks import hand_on, kept_away
from mosaic.ranks.running.reduced import ReducedModel
from mosaic.ranks.world.progress import THE_LOOP


class _Instead:
    """Stands for a function of torch while there are colocated models."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain
        self.handles: weakref.WeakSet[ReducedModel] = weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does what the function does, for all ranks where it is about a colocated model."""
        return self.plain(*args, **kwargs)

    def handle_of(self, parameters: Iterable[Any]) -> ReducedModel | None:
        """Returns the handle of the model that any of these parameters belongs to."""
        asked = {id(parameter) for parameter in parameters}
        return next((handle for handle in self.handles if asked & handle._counted_here.keys()), None)


class _Clip(_Instead):
    def __call__(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        handle = self.handle_of(given)
        if handle is None:
            return self.plain(given, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = _norm_over_ranks(handle, given, float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients of all ranks is non-finite, so it cannot be clipped"
            )
        clip_grads_with_norm_(given, max_norm, norm, foreach)
        return norm


class _Norm(_Instead):
    def __call__(self, tensors: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        asked = {id(tensor) for tensor in given}
        for handle in self.handles:
            if any(id(parameter.grad) in asked for parameter in handle._model.parameters()):
                raise ModuleContractError(
                    "get_total_norm was given gradients of a model that is colocated over several ranks, and cannot "
                    "know of those on other ranks; call torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"
                )
        return self.plain(given, *args, **kwargs)


class _Unscale(_Instead):
    def __call__(
        self, scaler: GradScaler, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = self.plain(scaler, optimizer, inv_scale, found_inf, fp16)
        handle = self.handle_of(parameter for group in optimizer.param_groups for parameter in group["params"])
        if handle is None:
            return found
        found = found or {found_inf.device: found_inf}  # a rank may have no gradients at all
        worst = torch.stack([flag.reshape(()) for flag in found.values()]).max()
        with handle.world.progress.waiting(THE_LOOP, "agreement"):
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=handle.world.carrier_of(worst))
        for flag in found.values():
            flag.fill_(worst)
        return found


class _Wrap(_Instead):
    def __call__(self, wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        handle = self.handle_of(module.parameters())
        if handle is None:
            self.plain(wrapper, module, *args, **kwargs)
            return
        given = inspect.signature(self.plain).bind(wrapper, module, *args, **kwargs).arguments
        options = {name: value for name, value in list(given.items())[2:] if name != "kwargs"}
        hand_on(wrapper, module, handle, {**options, **given.get("kwargs", {})})


class _Convert(_Instead):
    def __call__(self, module: nn.Module, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.plain(module, kept_away(module, fn), *args, **kwargs)


class _State(_Instead):
    def __call__(self, optimizer: Optimizer) -> dict[str, Any]:
        found: dict[str, Any] = self.plain(optimizer)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        away = {index: {"elsewhere": p.detach()} for index, p in enumerate(own) if isinstance(p, Elsewhere)}
        return {**found, "state": {**found["state"], **away}} if found["state"] else found


class _Step(_Instead):
    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _JOINT]
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]] if kinds else []
        handle = self.handle_of(own)
        if handle is not None and any(id(parameter) in handle._divided for parameter in own):
            raise ModuleContractError(
                f"{type(optimizer).__name__} {_JOINT[kinds[0]]}, and parameters of this model are on some of the ranks "
                "only; make an optimizer that steps each parameter by itself, such as SGD or AdamW, or give a plan "
                "that has every module on all ranks"
            )


_JOINT = {
    "LBFGS": "steps all parameters as one",
    "ZeroRedundancyOptimizer": "spreads parameters over the ranks, where Mosaic has done that",
}
"""Optimizers that need all parameters on each rank, and why."""


def enter(handle: ReducedModel) -> None:
    """Makes torch's functions know of a model."""
    for place in _PLACES:
        place.get().handles.add(handle)


def leave(handle: ReducedModel) -> None:
    """Undoes ``enter``; does nothing where that has not been done."""
    for place in _PLACES:
        place.drop(handle)


def _norm_over_ranks(handle: ReducedModel, parameters: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Returns the norm of all ranks' gradients, each counted once; of what is not the model's, this rank's."""
    counted = handle._counted_here
    device = handle.world.device
    own = _powers((p for p in parameters if counted.get(id(p), False)), order, device)
    others = _powers((p for p in parameters if id(p) not in counted), order, device)
    at_most = order == math.inf
    with handle.world.progress.waiting(THE_LOOP, "agreement"):
        op = dist.ReduceOp.MAX if at_most else dist.ReduceOp.SUM
        dist.all_reduce(own, op=op, group=handle.world.carrier_of(own))
    total = torch.maximum(own, others) if at_most else (own + others) ** (1 / order)
    return total if any(p.dtype == torch.float64 for p in parameters) else total.float()


def _powers(parameters: Iterator[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Returns the sum of the powers of all gradients' elements, or their largest; a double on the ranks' device."""
    norms = [
        torch.linalg.vector_norm(_values(p.grad), order, dtype=torch.promote_types(p.grad.dtype, torch.float32))
        .double()
        .to(device)
        for p in parameters
        if p.grad is not None
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.max() if order == math.inf else (stacked**order).sum()


def _values(grad: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's elements that may differ from 0."""
    return grad.detach().coalesce().values() if grad.is_sparse else grad.detach()


class _Inside:
    """The function that one of torch's decorated functions calls, kept in its closure."""

    def __init__(self, function: Callable[..., Any], kind: type[_Instead]) -> None:
        (self._cell,) = function.__closure__ or ()  # of the decorator _no_grad in torch.nn.utils.clip_grad
        self._kind = kind

    def get(self) -> _Instead:
        """Returns what stands there instead; puts it there if need be."""
        found = self._cell.cell_contents
        if not isinstance(found, _Instead):
            found = self._cell.cell_contents = self._kind(found)
        return found

    def drop(self, handle: ReducedModel) -> None:
        """Takes a handle off, and puts the plain function back after the last."""
        found = self._cell.cell_contents
        if isinstance(found, _Instead):
            found.handles.discard(handle)
            if not found.handles:
                self._cell.cell_contents = found.plain


class _Method:
    """A method of one of torch's classes."""

    def __init__(self, owner: type, name: str, kind: type[_Instead]) -> None:
        self._owner, self._name, self._kind = owner, name, kind

    def get(self) -> _Instead:
        """Returns what stands there instead; puts it there if need be."""
        found = getattr(self._owner, self._name)
        instead = getattr(found, "_mosaic_instead", None)
        if instead is None:
            instead = self._kind(found)

            def method(this: Any, *args: Any, **kwargs: Any) -> Any:
                return instead(this, *args, **kwargs)

            method._mosaic_instead = instead  # type: ignore[attr-defined]
            setattr(self._owner, self._name, method)
        kept: _Instead = instead
        return kept

    def drop(self, handle: ReducedModel) -> None:
        """Takes a handle off, and puts the plain method back after the last."""
        instead = getattr(getattr(self._owner, self._name), "_mosaic_instead", None)
        if instead is not None:
            instead.handles.discard(handle)
            if not instead.handles:
                setattr(self._owner, self._name, instead.plain)


class _BeforeSteps:
    """What torch calls before each optimizer's step."""

    def __init__(self) -> None:
        self._instead: _Instead | None = None
        self._hook: RemovableHandle | None = None

    def get(self) -> _Instead:
        """Returns what is called; registers it if need be."""
        if self._instead is None:
            self._instead = _Step(lambda *_: None)
            self._hook = register_optimizer_step_pre_hook(self._instead)
        return self._instead

    def drop(self, handle: ReducedModel) -> None:
        """Takes a handle off, and the hook after the last."""
        if self._instead is not None and self._hook is not None:
            self._instead.handles.discard(handle)
            if not self._instead.handles:
                self._hook.remove()
                self._instead = None


_PLACES = (
    _Inside(clip_grad_norm_, _Clip),
    _Inside(get_total_norm, _Norm),
    _Method(GradScaler, "_unscale_grads_", _Unscale),
    _Method(DistributedDataParallel, "__init__", _Wrap),
    _Method(nn.Module, "_apply", _Convert),
    _Method(Optimizer, "state_dict", _State),
    _BeforeSteps(),
)
