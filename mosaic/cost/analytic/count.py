"""Counting a module: one forward and backward on tensors without data."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from mosaic.cost.analytic.autocast import CudaAutocast
from mosaic.cost.analytic.fake import Resize, fake_copy, leading_sizes
from mosaic.cost.analytic.gpu_kernels import GpuKernels
from mosaic.cost.analytic.trace import LiveMemory, OperatorTrace
from mosaic.cost.counts import MemoryCounts, ModuleCounts, PhaseCounts, merge_equal
from mosaic.errors import UnsupportedModelError

_log = logging.getLogger(__name__)

KernelsOf = Literal["cuda", "host"]
"""Whose kernels are counted."""
Settings = Callable[[], AbstractContextManager[Any]]
"""Makes a context for the forward, such as ``lambda: torch.autocast("cpu", torch.bfloat16)``."""


def count_module(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: KernelsOf = "cuda",
    settings: Settings | None = None,
    autocast: torch.dtype | None = None,
    batch: int | None = None,
    rows: int | None = None,
    with_data: bool = False,
) -> ModuleCounts:
    """Counts operators, bytes and memory of one forward and backward of a module that AdamW trains.

    Nothing is computed and neither module nor arguments are touched: they are copied to tensors without data, so a
    module may be larger than this machine, and may lie on the meta device. Backward is autograd's own, so what a
    frozen parameter or an input without gradient saves is saved here too, and checkpoints are recomputed.

    Args:
        module: In the mode (train or eval) in which it will run.
        args: Positional arguments of one call; tensors keep their ``requires_grad``.
        kwargs: Keyword arguments.
        target: Whose choice of kernels to follow where torch has several: fused attention and cuDNN's recurrent
            layers on ``cuda``.
        settings: Context of the forward; on these tensors torch's own autocast is the CPU's.
        autocast: Cast to this as CUDA's autocast does; not at all by default.
        batch: Samples to count instead of those in the arguments: every tensor with ``rows`` rows gets so many.
        rows: Samples in the arguments; by default the most frequent first dimension of arguments, of those that results
            have too.
        with_data: Whether to compute on copies with data, for a module whose operators depend on values; with as many
            samples as the arguments have.

    Raises:
        UnsupportedModelError: The call fails on tensors without data: what it does depends on values, or an
            operator has no rule for its result's shape. Names the operator; such a module must be profiled.
    """
    given = (tuple(args), dict(kwargs or {}))
    sizes = leading_sizes(given)
    likely = (max(sizes, key=lambda size: sizes[size]) if sizes else 0) if rows is None else rows
    resize = _resizing(likely, batch) if batch is not None and likely else None
    mode: AbstractContextManager[Any] = nullcontext()
    if with_data:
        fake, (fake_args, fake_kwargs) = copy.deepcopy(module), copy.deepcopy(given)
    else:
        mode = without_data = FakeTensorMode(allow_non_fake_inputs=True)
        fake, (fake_args, fake_kwargs) = fake_copy(module, without_data), fake_copy(given, without_data, resize)
    run = _Run(fake, fake_args, fake_kwargs, on_gpu=target == "cuda", settings=settings, autocast=autocast)
    try:
        with mode:
            forward, backward, memory, uncounted = run.count()
    except Exception as error:
        name = type(module).__name__
        raise UnsupportedModelError(
            f"{name} cannot be counted: on tensors with{'' if with_data else 'out'} data it fails with "
            f"{type(error).__name__}: "
            f"{_first_line(error)}; profile it instead, or leave it out"
        ) from error
    return ModuleCounts(
        batch=batch if resize is not None and batch is not None else _rows(sizes, run.result_sizes, likely),
        forward=forward,
        backward=backward,
        memory=_with_residents(fake, memory),
        uncounted=uncounted,
    )


def count_degrees(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    degrees: Sequence[int] = (1, 2, 4, 8, 16, 32),
    target: KernelsOf = "cuda",
    settings: Settings | None = None,
    autocast: torch.dtype | None = None,
) -> dict[int, ModuleCounts]:
    """Counts a module at several data-parallel degrees: a device of degree d has ceil(B/d) of the B samples.

    Nothing is scaled: each degree is counted by itself, so what does not shrink with the batch does not. Degrees
    above B are left out, and so is, with a warning, a degree at which the module does not take its part of the batch.

    Args:
        module: See ``count_module``.
        args: See ``count_module``; the batch is the most frequent first dimension, of those that results have too.
        kwargs: See ``count_module``.
        degrees: Degrees to count; the whole batch (degree 1) always is.
        target: See ``count_module``.
        settings: See ``count_module``.
        autocast: See ``count_module``.

    Raises:
        UnsupportedModelError: See ``count_module``.
    """
    whole = count_module(module, args, kwargs, target=target, settings=settings, autocast=autocast)
    counted = {1: whole}
    for degree in sorted(set(degrees) - {1}):
        if not 1 <= degree <= whole.batch:
            continue
        try:
            batch = -(-whole.batch // degree)
            counted[degree] = count_module(
                module,
                args,
                kwargs,
                target=target,
                settings=settings,
                autocast=autocast,
                batch=batch,
                rows=whole.batch,
            )
        except UnsupportedModelError as error:
            _log.warning("degree %d is left out: %s", degree, error)
    return counted


class _Run:
    """One forward and backward of a module of fake tensors.

    Attributes:
        result_sizes: The first dimensions of what the forward returned.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        *,
        on_gpu: bool,
        settings: Settings | None,
        autocast: torch.dtype | None,
    ) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self._settings: Settings = settings or nullcontext
        self._autocast = CudaAutocast(autocast) if autocast is not None else None
        self._gpu = GpuKernels(self._autocast) if on_gpu else None
        self._memory = LiveMemory((*module.parameters(), *module.buffers()))
        self._saved: dict[int, int] = {}
        self._resident = {id(t.untyped_storage()) for t in (*module.parameters(), *module.buffers())}
        self.result_sizes: set[int] = set()

    def count(self) -> tuple[PhaseCounts, PhaseCounts, MemoryCounts, tuple[str, ...]]:
        """Returns the operators of both phases, what they keep, and which of them are not known."""
        forward_trace, backward_trace = OperatorTrace(self._memory), OperatorTrace(self._memory)
        if self._gpu is not None:
            forward_trace.fused_region = backward_trace.fused_region = self._gpu.in_recurrent_call
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        seen = self._gpu or self._autocast or nullcontext()
        with seen, torch.enable_grad(), forward_trace, hooks, self._settings():
            outputs = self._module(*self._args, **self._kwargs)
        forward_peak = self._memory.peak_bytes
        self._memory.start_phase()
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._release_gradient)
        made = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        self.result_sizes = {len(leaf) for leaf in made if leaf.dim()}
        wanted = [leaf for leaf in made if leaf.requires_grad]
        outputs, made = None, []
        if wanted:
            gradients = [torch.empty_like(output) for output in wanted]
            with seen, backward_trace:
                torch.autograd.backward(wanted, gradients)
        kept = MemoryCounts(
            parameter_bytes=0,
            activation_bytes=sum(self._saved.values()),
            forward_peak_bytes=forward_peak,
            backward_peak_bytes=self._memory.peak_bytes if backward_trace.operators else 0,
        )
        return (
            PhaseCounts(operators=merge_equal(forward_trace.operators)),
            PhaseCounts(operators=merge_equal(backward_trace.operators)),
            kept,
            tuple({**forward_trace.uncounted, **backward_trace.uncounted}),
        )

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._resident:
            self._saved[id(storage)] = storage.nbytes()
            self._memory.add(tensor)
        return tensor

    def _release_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._memory.release(parameter.grad)


def _with_residents(module: nn.Module, run: MemoryCounts) -> MemoryCounts:
    """Adds what stays from step to step; AdamW's two moments have the parameter's dtype."""
    trained = _num_bytes_of(p for p in module.parameters() if p.requires_grad)
    return dataclasses.replace(
        run,
        parameter_bytes=_num_bytes_of(module.parameters()),
        buffer_bytes=_num_bytes_of(module.buffers()),
        gradient_bytes=trained,
        optimizer_bytes=2 * trained,
    )


def _num_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rows(sizes: Mapping[int, int], results: Collection[int], likely: int) -> int:
    """Returns the samples in arguments: tables of a position each may be more, but no result has a row for each."""
    both = {size: count for size, count in sizes.items() if size in results}
    return likely if likely in both or not both else max(both, key=lambda size: both[size])


def _resizing(found: int, wanted: int) -> Resize:
    def resize(shape: torch.Size) -> tuple[int, ...]:
        return (wanted, *shape[1:]) if len(shape) > 0 and shape[0] == found else tuple(shape)

    return resize


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
