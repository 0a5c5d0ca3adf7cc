"""Trial runs of a branch before its capture: they set libraries up, and show what a capture could not do.

They run on a plain stream: libraries plan and tune at first use, and some cannot on a green-context one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from mosaic.engine.branch_graph import survey
from mosaic.engine.random_numbers import other_random_state
from mosaic.engine.stage_graph_branch import GraphedBranch
from mosaic.engine.stage_graph_module import RefusalError
from mosaic.engine.stage_graph_watch import CaptureWatch
from mosaic.engine.structure import flatten, is_opaque, tensors_in


def try_out(
    branch: GraphedBranch,
    device: torch.device,
    times: int,
    as_captured: Callable[[GraphedBranch], AbstractContextManager[None]],
) -> None:
    """Runs a branch forward and backward on the current stream.

    Args:
        branch: The branch.
        device: Where its tensors are.
        times: How often; at least once.
        as_captured: Brings about, inside a block, what will hold in the capture.

    Raises:
        RefusalError: It does something that a graph cannot do.
    """
    state = branch.state
    own = [*state.aliases().values(), *state.tensors.values()]
    others, on_host = other_random_state(), torch.get_rng_state()
    for trial in range(max(times, 1)):
        watch = CaptureWatch(device, branch.static, own) if trial == 0 else None
        with as_captured(branch), watch or nullcontext(), _waiting_refused(device, trial > 0):
            result = branch.call.run_on(branch.static)
        if watch is not None and watch.obstacle is not None:
            raise RefusalError(watch.obstacle)
        _check_result(branch, result, device)
        _go_backward(branch, result)
        change = state.change()
        if change is not None:
            raise RefusalError(f"{change.text} in the call itself")
        added = state.new_attribute()
        if added is not None:
            raise RefusalError(f"it made its attribute {added!r} in the call itself", lasting=False)
    if others != other_random_state():
        raise RefusalError("it draws from Python's or numpy's random numbers")
    if device.type != "cpu" and not torch.equal(on_host, torch.get_rng_state()):
        raise RefusalError("it draws random numbers on the CPU")


def _go_backward(branch: GraphedBranch, result: Any) -> None:
    made = [tensor for tensor in tensors_in(result) if tensor.requires_grad and not tensor.is_leaf]
    leaves = [leaf for leaf in (*branch.static, *branch.state.aliases().values()) if leaf.requires_grad]
    if made:
        torch.autograd.grad(made, leaves, [torch.ones_like(tensor) for tensor in made], allow_unused=True)


def _check_result(branch: GraphedBranch, result: Any, device: torch.device) -> None:
    leaves, _ = flatten(result)
    for leaf in leaves:
        if is_opaque(leaf):
            raise RefusalError(f"it returns a {type(leaf).__name__}, which may hide tensors")
        if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise RefusalError(f"it returns a {type(leaf).__name__}, not a plain tensor")
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            raise RefusalError(f"it returns a tensor on {leaf.device}")
    found = survey([tensor for tensor in tensors_in(result) if tensor.requires_grad])
    known = {id(tensor) for tensor in (*branch.static, *branch.state.aliases().values())}
    strange = [leaf for key, leaf in found.leaves.items() if key not in known]
    if strange:
        shape = "x".join(map(str, strange[0].shape)) or "scalar"
        raise RefusalError(f"its result depends on a {shape} leaf that is neither an argument nor a parameter of it")
    if any("Checkpoint" in name for name in found.names):
        raise RefusalError("it uses activation checkpointing")


@contextmanager
def _waiting_refused(device: torch.device, refused: bool) -> Iterator[None]:
    """Makes torch raise where it would block on the device: a capture that meets such a call is lost."""
    if device.type != "cuda" or not refused:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
