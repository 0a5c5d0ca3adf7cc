"""Functions of torch that a plain loop calls with one rank's gradients, made right for gradients on several ranks.

As long as a model is colocated over ranks, and for its parameters only:

* ``torch.nn.utils.clip_grad_norm_`` takes the norm over all ranks, however it was imported; ``get_total_norm``, whose
  arguments do not show whose gradients are missing, raises;
* ``torch.amp.GradScaler`` skips a step on all ranks if one of them has an infinite gradient;
* ``DistributedDataParallel`` around the model passes calls through;
* ``model.to(device)`` leaves stand-ins for parameters of other ranks as they are;
* an optimizer that steps all parameters as one (``LBFGS``), or spreads them over ranks itself
  (``ZeroRedundancyOptimizer``), raises where some are on other ranks;
* ``optimizer.state_dict()`` has a stand-in for state on other ranks, so saving it raises; loading it leaves that out.

Functions are replaced inside of torch's own, so names that were imported before mean them too, and put back when the
last such model is given back by ``handle.remove()``.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os.path import commonprefix
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mosaic.errors import ModuleContractError, UnsupportedModelError
from mosaic.find.structure import map_tensors
from mosaic.ranks.parameters.elsewhere import Elsewhere, GivenUp
from mosaic.ranks.world.progress import THE_LOOP

_JOINT = ("LBFGS", "ZeroRedundancyOptimizer")
"""Optimizers that need all parameters on each rank."""
_ELSEWHERE = "elsewhere"  # in place of a parameter's state that another rank has
_OWN_REDUCTION = {
    *("self", "module", "kwargs", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync"),
    *("process_group", "bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view"),
    "static_graph",
}
"""Options of DistributedDataParallel that say what it wraps and how it reduces; others change what is computed."""

_Paths = dict[int, list[str]]
"""The names of a model's parameters by id, each as its parts."""


class _Patches:
    """Torch's functions while there are colocated models."""

    def __init__(self) -> None:
        self._handles: weakref.WeakKeyDictionary[Any, _Paths] = weakref.WeakKeyDictionary()
        """Each ``RankHandle`` and ``Pipeline``, with its parameters."""
        self._undo: list[Callable[[], None]] = []

    def enter(self, handle: Any) -> None:
        self._handles[handle] = {id(p): name.split(".") for name, p in handle._model.named_parameters()}
        if self._undo:
            return
        # The functions that torch.nn.utils.clip_grad's decorator _no_grad calls are in its closure.
        self._in_cell(clip_grad_norm_, self._clip)
        self._in_cell(get_total_norm, self._norm)
        self._in_class(GradScaler, "_unscale_grads_", self._unscale)
        self._in_class(DistributedDataParallel, "__init__", self._wrap)
        self._in_class(nn.Module, "_apply", _convert)
        self._in_class(Optimizer, "state_dict", _state)
        self._in_class(Optimizer, "load_state_dict", _load_state)
        self._undo.append(register_optimizer_step_pre_hook(self._before_step).remove)

    def leave(self, handle: Any) -> None:
        """Undoes ``enter``; does nothing where that has not been done."""
        self._handles.pop(handle, None)
        if not self._handles:
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()

    def _in_cell(self, function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        (cell,) = function.__closure__ or ()
        plain = cell.cell_contents
        cell.cell_contents = partial(replacement, plain)
        self._undo.append(lambda: setattr(cell, "cell_contents", plain))

    def _in_class(self, owner: type, name: str, replacement: Callable[..., Any]) -> None:
        plain = getattr(owner, name)

        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement(plain, this, *args, **kwargs)

        setattr(owner, name, method)
        self._undo.append(lambda: setattr(owner, name, plain))

    def _handle_of(self, parameters: Iterable[Any]) -> Any | None:
        """Returns the handle of the model that any of these parameters belongs to."""
        ids = {id(parameter) for parameter in parameters}
        return next((handle for handle in self._handles if ids & handle._counted_here.keys()), None)

    def _only_handle(self) -> Any | None:
        """Returns the handle of the only model on several ranks, whose gradients may all be on others."""
        return next(iter(self._handles)) if len(self._handles) == 1 else None

    def _clip(
        self,
        plain: Callable[..., Any],
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        own = _listed(parameters)
        handle = self._handle_of(own) if own else self._only_handle()
        if handle is None:
            return plain(own, max_norm, norm_type, error_if_nonfinite, foreach)
        _check_same_part(handle, self._handles[handle], own)
        norm = _norm_over_ranks(handle, own, float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients of all ranks is non-finite, so it cannot be clipped"
            )
        clip_grads_with_norm_(own, max_norm, norm, foreach)
        return norm

    def _norm(
        self, plain: Callable[..., Any], tensors: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        own = _listed(tensors)
        ids = {id(tensor) for tensor in own}
        for handle in self._handles:
            if any(id(parameter.grad) in ids for parameter in handle._model.parameters()):
                raise ModuleContractError(
                    "get_total_norm was given gradients of a model that is colocated over several ranks, and cannot "
                    "know of those on other ranks; call torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"
                )
        return plain(own, *args, **kwargs)

    def _unscale(
        self, plain: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any
    ) -> dict[torch.device, torch.Tensor]:
        flags: dict[torch.device, torch.Tensor] = plain(scaler, optimizer, *args)
        handle = self._handle_of(_parameters_of(optimizer))
        if handle is None:
            return flags
        found_inf = args[1]
        flags = flags or {found_inf.device: found_inf}  # a rank may have no gradients at all
        worst = torch.stack([flag.reshape(()) for flag in flags.values()]).max()
        _all_reduce(handle, worst, dist.ReduceOp.MAX)
        for flag in flags.values():
            flag.fill_(worst)
        return flags

    def _wrap(
        self, plain: Callable[..., Any], wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        handle = self._handle_of(module.parameters())
        if handle is None:
            plain(wrapper, module, *args, **kwargs)
            return
        bound = inspect.signature(plain).bind(wrapper, module, *args, **kwargs).arguments
        _pass_through(wrapper, module, handle, {**bound, **bound.get("kwargs", {})})

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(kind.__name__ in _JOINT for kind in type(optimizer).__mro__):
            return
        own = _parameters_of(optimizer)
        handle = self._handle_of(own)
        if handle is not None and any(id(parameter) in handle._divided for parameter in own):
            raise ModuleContractError(
                f"{type(optimizer).__name__} needs all parameters on each rank, and those of this model are on some of "
                "the ranks only; make an optimizer that steps each parameter by itself, such as SGD or AdamW, or give "
                "a plan that has every module on all ranks"
            )


_PATCHES = _Patches()
enter = _PATCHES.enter
leave = _PATCHES.leave
handles = _PATCHES._handles  # the active ones, with their parameters


def _convert(
    plain: Callable[..., Any], module: nn.Module, convert: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Converts a module's tensors, as ``model.to`` does; stand-ins stay on the meta device, with the new type."""
    if not any(isinstance(hook, GivenUp) for hook in module._forward_pre_hooks.values()):
        return plain(module, convert, *args, **kwargs)

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return convert(tensor)  # type: ignore[no-any-return]
        return tensor.to(convert(torch.empty(0, dtype=tensor.dtype)).dtype)

    return plain(module, converted, *args, **kwargs)


def _state(plain: Callable[..., Any], optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = plain(optimizer)
    away = {
        index: {_ELSEWHERE: parameter.detach()}
        for index, parameter in enumerate(_parameters_of(optimizer))
        if isinstance(parameter, Elsewhere)
    }
    return {**state, "state": {**state["state"], **away}} if state["state"] else state


def _load_state(plain: Callable[..., Any], optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    states = state_dict["state"].items()
    here = {index: state for index, state in states if not (isinstance(state, dict) and _ELSEWHERE in state)}
    plain(optimizer, {**state_dict, "state": here})


def _listed(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _all_reduce(handle: Any, tensor: torch.Tensor, op: Any) -> None:
    with handle.world.progress.waiting(THE_LOOP, "agreement"):
        dist.all_reduce(tensor, op=op, group=handle.world.carrier_of(tensor))


def _check_same_part(handle: Any, paths: _Paths, parameters: Sequence[torch.Tensor]) -> None:
    """Raises ModuleContractError, on all ranks, if they clip different modules and some rank not all its gradients."""
    ids = {id(parameter) for parameter in parameters}
    shared = commonprefix([path for key, path in paths.items() if key in ids]) or []  # noqa: RUF071  # of words
    part = [at for at, path in enumerate(paths.values()) if path[: len(shared)] == shared]
    others = any(p.grad is not None for p in handle._model.parameters() if id(p) not in ids)
    parts = torch.zeros(handle.world.size, 3, dtype=torch.int64)
    parts[handle.world.rank] = torch.tensor([part[0], part[-1], others])
    _all_reduce(handle, parts, dist.ReduceOp.SUM)
    first, last, with_others = parts.unbind(1)
    if with_others.any() and first.max() > last.min():
        raise ModuleContractError(
            f"clip_grad_norm_ was called for {'.'.join(shared)} here and for another part on other ranks; call it on "
            "all ranks for the same parameters, also for those that have no gradient there"
        )


def _norm_over_ranks(handle: Any, parameters: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Returns the norm of all ranks' gradients, each counted once; of other parameters, this rank's."""
    counted, device = handle._counted_here, handle.world.device
    own = _powers((p for p in parameters if counted.get(id(p), False)), order, device)
    others = _powers((p for p in parameters if id(p) not in counted), order, device)
    is_largest = order == math.inf
    _all_reduce(handle, own, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
    total = torch.maximum(own, others) if is_largest else (own + others) ** (1 / order)
    return total if any(p.dtype == torch.float64 for p in parameters) else total.float()


def _powers(parameters: Iterable[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Returns the sum of the powers of all gradients' elements, or their largest; a double on the ranks' device."""
    norms = []
    for grad in [p.grad.detach() for p in parameters if p.grad is not None]:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(grad, order, dtype=dtype).double().to(device))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.max() if order == math.inf else (stacked**order).sum()


# The wrapper that accelerate, Trainer and loops of one's own put around a model on several ranks.


class _NullReducer:
    """The reducer that frameworks prepare for a backward."""

    def prepare_for_backward(self, outputs: object) -> None: ...

    def _rebuild_buckets(self) -> None: ...


class PassThroughDDP(DistributedDataParallel):
    """A wrapper around a model whose gradients are reduced already."""

    reducer = _NullReducer()  # type: ignore[assignment]  # no C++ reducer
    static_graph = find_unused_parameters = broadcast_buffers = gradient_as_bucket_view = False
    require_forward_param_sync = require_backward_grad_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; inputs go to ``device_ids`` first, as with any such wrapper."""
        handle = self.__dict__.get("_mosaic_handle")
        if handle is not None and (handle() is None or not handle().active):
            raise ModuleContractError(
                "DistributedDataParallel was made around a model that was colocated over ranks, and reduces nothing; "
                "after handle.remove() wrap the plain model again"
            )
        if self.device_ids:
            device = self.device_ids[0]
            args, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing: gradients are reduced after every backward, and their sum is the same."""
        yield

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedModelError(
            "join() around a model that is colocated over ranks, which is called equally often on all of them: a rank "
            "that has nothing left calls it with a batch of no rows"
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        raise UnsupportedModelError(
            "a communication hook around a model that is colocated over ranks, which reduces its gradients itself; "
            "leave the hook out"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy runs its own weights in the plain way, where it has them."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_mosaic_handle", "process_group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.__dict__["process_group"] = dist.group.WORLD


def _pass_through(wrapper: Any, module: nn.Module, handle: Any, options: Mapping[str, Any]) -> None:
    """Makes a wrapper that is being constructed one that passes calls through, unless it would do more than reduce."""
    own, group = handle._counted_here, options.get("process_group") or dist.group.WORLD
    others = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in own]
    if changing := sorted(name for name in options if name not in _OWN_REDUCTION and options[name]):
        reason = f"DistributedDataParallel(..., {', '.join(changing)}=...) around"
        remedy = "which reduces its gradients itself; leave that out"
    elif dist.get_world_size(group) != handle.world.size:
        reason = f"DistributedDataParallel over {dist.get_world_size(group)} of the {handle.world.size} ranks around"
        remedy = "over all of them; leave process_group out"
    elif others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        reason = f"DistributedDataParallel around {others[0]}{more} and"
        remedy = "whose gradients are reduced already: colocate the module that holds both, or wrap the others only"
    else:
        reason = remedy = ""
    if reason:
        raise UnsupportedModelError(f"{reason} a model that is colocated over ranks, {remedy}")
    nn.Module.__init__(wrapper)
    kind = type(wrapper)
    wrapper.__class__ = (
        PassThroughDDP if kind is DistributedDataParallel else type(kind.__name__, (kind, PassThroughDDP), {})
    )
    devices = options.get("device_ids") or ()
    wrapper.module = module
    wrapper.device_ids = [torch.device("cuda", one) if isinstance(one, int) else one for one in devices] or None
    wrapper.output_device = options.get("output_device")
    wrapper.dim = options.get("dim", 0)
    wrapper.device = handle.world.device
    wrapper.device_type = handle.world.device.type
    wrapper.process_group = group
    wrapper.__dict__["_mosaic_handle"] = weakref.ref(handle)
