"""The wrapper that frameworks put around a model which is colocated over ranks: it passes calls through.

accelerate, transformers' Trainer and loops of one's own wrap a model in ``DistributedDataParallel`` when torchrun has
started several processes. Mosaic reduces the gradients, so the wrapper reduces nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mosaic.engine.calls.structure import map_tensors
from mosaic.errors import ModuleContractError, UnsupportedModelError
from mosaic.ranks.world.world import World

_OWN_REDUCTION = {
    *("device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group", "bucket_cap_mb"),
    *("find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph"),
}
"""Options that say how the wrapper reduces; others change what is computed."""


class ReducedModel(Protocol):
    """The handle of a model whose gradients Mosaic reduces over ranks."""

    world: World
    _model: nn.Module

    @property
    def active(self) -> bool:
        """True if Mosaic still reduces its gradients."""

    @property
    def _divided(self) -> frozenset[int]:
        """Ids of the parameters that some rank does not hold."""

    @property
    def _counted_here(self) -> dict[int, bool]:
        """For the id of each parameter of the model, whether this rank counts it."""


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

    def join(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            "join() lets ranks have fewer batches; a model that is colocated over ranks is called equally often on "
            "all of them: a rank that has nothing left calls it with a batch of no rows"
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        raise UnsupportedModelError(
            "a communication hook changes how DistributedDataParallel reduces gradients, and Mosaic reduces those of "
            "a model that is colocated over ranks; leave the hook out"
        )

    def _set_static_graph(self) -> None: ...

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def train(self, mode: bool = True) -> PassThroughDDP:
        nn.Module.train(self, mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy runs its own weights in the plain way, where it has them."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_mosaic_handle", "process_group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As any module does; the ranks are those of the process that reads it."""
        nn.Module.__setstate__(self, state)
        self.__dict__["process_group"] = dist.group.WORLD


def make_pass_through(wrapper: Any, module: nn.Module, handle: ReducedModel, options: Mapping[str, Any]) -> None:
    """Makes a wrapper that is being constructed one that passes calls through.

    Raises:
        UnsupportedModelError: The wrapper would have done more than reducing, or reduced more than the model's.
    """
    changing = sorted(name for name, value in options.items() if name not in _OWN_REDUCTION and value)
    if changing:
        raise UnsupportedModelError(
            f"DistributedDataParallel(..., {', '.join(changing)}=...) around a model that is colocated over ranks, "
            "which reduces its gradients itself; leave that out"
        )
    group = options.get("process_group")
    if group is not None and dist.get_world_size(group) != handle.world.size:
        raise UnsupportedModelError(
            f"DistributedDataParallel over {dist.get_world_size(group)} of the {handle.world.size} ranks that the "
            "model is colocated over; leave process_group out"
        )
    own = handle._counted_here
    others = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in own]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UnsupportedModelError(
            f"DistributedDataParallel around {others[0]}{more} and a model that is colocated over ranks, whose "
            "gradients are reduced already: colocate the module that holds both, or wrap the others only"
        )
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
    wrapper.process_group = group if group is not None else dist.group.WORLD
    wrapper.__dict__["_mosaic_handle"] = weakref.ref(handle)
