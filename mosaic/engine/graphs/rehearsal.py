"""Trial runs of a branch before its capture: they set libraries up, and show what a capture could not do.

They run on a plain stream: libraries plan and tune at first use, and some cannot on a green-context one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.backends.streams.api import StreamApi
from mosaic.engine.calls.branch_graph import survey
from mosaic.engine.calls.structure import flatten, is_opaque, tensors_in
from mosaic.engine.calls.thread_state import as_lane, saved_tensor_hooks
from mosaic.engine.calls.torch_functions import written_arguments
from mosaic.engine.graphs.branches import RefusalError, TakenCall
from mosaic.engine.graphs.module_state import ModuleState
from mosaic.find.random_numbers import CPU, python_state, torch_state

NUM_TRIALS = 3
"""As in ``torch.cuda.make_graphed_callables``."""

_READS_BACK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_CONSTANTS = ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")
_COPIES = ("aten::_to_copy", "aten::copy_")


def try_out(call: TakenCall, static: list[torch.Tensor], state: ModuleState, api: StreamApi) -> None:
    """Runs a call forward and backward on the current stream.

    Args:
        call: The call.
        static: Leaves to call it with.
        state: Its module.
        api: The runtime.

    Raises:
        RefusalError: It does something that a graph cannot do.
    """
    device = api.device
    leaves = [*static, *state.aliases.values()]
    others, on_host, on_device = python_state(), torch_state(CPU), torch_state(device)
    for trial in range(NUM_TRIALS):
        watch = CaptureWatch(device, static, [*leaves, *state.tensors.values()]) if trial == 0 else None
        with as_captured(state), watch or nullcontext():
            result = call.run_on(static)
        if watch is not None and watch.obstacle is not None:
            raise RefusalError(watch.obstacle)
        _check_result(result, leaves, device)
        made = [tensor for tensor in tensors_in(result) if tensor.requires_grad and not tensor.is_leaf]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if made:
            ones = [torch.ones_like(tensor) for tensor in made]
            with torch.autocast(device.type, enabled=False):  # as it is captured, and as backwards run
                torch.autograd.grad(made, wanted, ones, allow_unused=True)
        added = state.new_attribute()
        if added is not None:
            raise RefusalError(f"it made its attribute {added!r} in the call itself", lasting=False)
        change = state.change()
        if change is not None:
            raise RefusalError(f"{change.text} in the call itself", lasting=not change.is_inside)
    if not others.is_same(python_state()):
        raise RefusalError("it draws from Python's or numpy's random numbers")
    if device.type != "cpu" and not on_host.is_same(torch_state(CPU)):
        raise RefusalError("it draws random numbers on the CPU")
    if not api.draws_apart and not on_device.is_same(torch_state(device)):
        raise RefusalError(
            "it draws random numbers, whose seed and offset all graphs of a device read from one place before torch "
            f"2.13 (this is {torch.__version__}), so that one replay may overwrite them under another"
        )


@contextmanager
def as_captured(state: ModuleState) -> Iterator[None]:
    """Puts stand-ins for parameters in place, and keeps autocast from keeping cast weights for later calls."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with state.with_aliases(), as_lane():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _check_result(result: Any, known: list[torch.Tensor], device: torch.device) -> None:
    for leaf in flatten(result)[0]:
        if is_opaque(leaf):
            raise RefusalError(f"it returns a {type(leaf).__name__}, which may hide tensors")
        if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise RefusalError(f"it returns a {type(leaf).__name__}, not a plain tensor")
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            raise RefusalError(f"it returns a tensor on {leaf.device}")
    found = survey([tensor for tensor in tensors_in(result) if tensor.requires_grad])
    strange = found.leaves.keys() - {id(tensor) for tensor in known}
    if strange:
        shape = _shape(found.leaves[min(strange)])
        raise RefusalError(f"its result depends on a {shape} leaf that is neither an argument nor a parameter of it")
    if any("Checkpoint" in name for name in found.names):
        raise RefusalError("it uses activation checkpointing")


class CaptureWatch(TorchDispatchMode):
    """Sees, operator by operator, why a call could not be replayed.

    Args:
        device: Where its tensors should be.
        inputs: Tensors that it is called with; not to be written to.
        own: These, and parameters, buffers and other tensors of its module.

    Attributes:
        obstacle: The first reason, or None.
    """

    def __init__(self, device: torch.device, inputs: Iterable[torch.Tensor], own: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.obstacle: str | None = None
        self._device = device
        self._inputs = storages(inputs)
        self._known = storages(own)
        self._hooks = saved_tensor_hooks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged, unless that might change what nobody could put back."""
        kwargs = kwargs or {}
        self._refuse(self._reason(func, args, kwargs))
        result = func(*args, **kwargs)
        made = _tensors(result)
        self._known |= storages(made)
        self._refuse(self._crossing(func, _tensors((args, kwargs)), made))
        return result

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            self.obstacle = self.obstacle or reason  # kept, too: the call may swallow the error
            raise RefusalError(self.obstacle)

    def _reason(self, func: Any, args: Any, kwargs: Any) -> str | None:
        if any(tag in func.tags for tag in _READS_BACK):
            return f"it needs a value back from the device in the middle ({func})"
        if saved_tensor_hooks() != self._hooks:
            return "it uses activation checkpointing or other hooks on saved tensors"
        if kwargs.get("generator") is not None:
            return "it draws random numbers from a generator of its own"
        if self._inputs & storages(_tensors(list(written_arguments(func, args, kwargs)))):
            return f"it writes into one of its inputs ({func})"
        if func.name().split(".")[0] in _CONSTANTS:
            return None
        strange = [tensor for tensor in self._reads(args, kwargs) if not storages([tensor]) & self._known]
        if strange:
            return f"it reads a {_shape(strange[0])} tensor that is neither an argument nor its module's own ({func})"
        return None

    def _crossing(self, func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> str | None:
        """Returns how an operator copies between the device and memory that the device cannot reach, or None."""
        name, here = func.name().split(".")[0], self._device.type
        if "attention" in name:  # outside of a capture it returns its seed and offset on the CPU
            return None
        elsewhere = next((tensor.device for tensor in made if tensor.device.type != here), None)
        if elsewhere is not None and self._reads(given):
            return f"it copies a tensor to {elsewhere} in the middle ({func})"
        if here == "cpu" or elsewhere is not None or name not in _COPIES:
            return None
        pageable = any(tensor.is_cpu and not tensor.is_pinned() for tensor in given)
        return f"it copies a tensor from memory that is not pinned in the middle ({func})" if pageable else None

    def _reads(self, *arguments: Any) -> list[torch.Tensor]:
        return [tensor for tensor in _tensors(arguments) if tensor.device.type == self._device.type]


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns keys of the memory behind tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
