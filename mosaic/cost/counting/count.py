"""Counts one forward and backward of a module on tensors without data."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from mosaic.cost.counting.cuda import CudaFunctions
from mosaic.cost.counting.layers import LayerCounts, RepeatedLayers
from mosaic.cost.counting.operators import Recorder, Tally, tensors_of
from mosaic.cost.counts import MemoryCounts, ModuleCounts, PhaseCounts, merge_equal
from mosaic.errors import UnsupportedModelError

_log = logging.getLogger(__name__)

KernelsOf = Literal["cuda", "host"]
"""Kind of device whose kernels are counted."""
Settings = Callable[[], AbstractContextManager[Any]]
"""Returns a context for the forward, such as ``lambda: torch.autocast("cpu", torch.bfloat16)``."""


class _Results(NamedTuple):
    rows: set[int]
    """First dimensions."""
    num_bytes: int
    gradient_bytes: int


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Silences torch's log of operators that fail without data."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


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
    layers: LayerCounts | None = None,
) -> ModuleCounts:
    """Counts operators, bytes and memory of one forward and backward of a module that AdamW trains.

    Nothing is computed: module and arguments are copied to tensors without data, so a module may exceed the memory of
    this machine or be on the meta device. Backward is autograd's own, so it includes recomputation in checkpoints and
    activations saved for frozen parameters. Equal layers in a list or a sequence are counted once per input size.

    Args:
        module: The module in the mode (train or eval) in which it will run.
        args: Positional arguments of one call; tensors keep their ``requires_grad``.
        kwargs: Keyword arguments.
        target: Kind of device: fused attention and dropout on ``cuda``, torch's CPU operators on ``host``.
        settings: Context of the forward; on these tensors torch's own autocast is the CPU's.
        autocast: Target dtype of CUDA's autocast; None: no casts.
        batch: Number of samples to count: every tensor with ``rows`` rows gets this number.
        rows: Number of samples in the arguments; by default their most frequent first dimension.
        with_data: If True, computes on copies with data, for a module whose operators depend on values.
        layers: Counts of layers so far, shared between modules and sizes of one unchanged model.

    Raises:
        UnsupportedModelError: The call fails on tensors without data, because its operators depend on values or an
            operator has no shape function. The message has the operator; profile such a module.
    """
    call_inputs = (tuple(args), dict(kwargs or {}))
    survey = _FakeCopies(None)
    survey.of(call_inputs)
    sizes = survey.sizes
    likely = (max(sizes, key=lambda size: sizes[size]) if sizes else 0) if rows is None else rows
    batch = batch if likely else None
    counts: LayerCounts = {} if layers is None else layers

    def run(on_meta: bool) -> tuple[nn.Module, Tally, _Results]:
        fake_mode = None if on_meta or with_data else FakeTensorMode(allow_non_fake_inputs=True)
        if with_data:
            fake, (fake_args, fake_kwargs) = copy.deepcopy(module), copy.deepcopy(call_inputs)
        else:
            fake = _FakeCopies(fake_mode).of(module)
            fake_args, fake_kwargs = _FakeCopies(fake_mode, likely, batch).of(call_inputs)
        functions: AbstractContextManager[Any] = CudaFunctions(autocast) if target == "cuda" else nullcontext()
        if target == "host" and autocast is not None:
            functions = torch.autocast("cpu", autocast)
        recorder = Recorder()
        repeated = nullcontext() if with_data else RepeatedLayers(recorder, counts, (target, autocast)).replaced(fake)
        tally = Tally((*fake.parameters(), *fake.buffers()))
        recorder.tallies.append(tally)
        with torch.device("meta") if on_meta else fake_mode or nullcontext(), repeated, quiet_fake_tensors():
            results = _run(fake, fake_args, fake_kwargs, recorder, functions, settings or nullcontext)
        return fake, tally, results

    # Meta tensors are several times faster than fake CPU tensors, but they ignore the CPU's autocast and kernels, and
    # do not mix with tensors that a module creates on the CPU.
    on_meta = target == "cuda" and not with_data and not _casts(settings)
    try:
        try:
            fake, tally, results = run(on_meta)
        except Exception:  # a module may raise anything on the meta device
            if not on_meta:
                raise
            fake, tally, results = run(False)
    except Exception as error:  # a user's module may raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot be counted: on tensors with{'' if with_data else 'out'} data it raises "
            f"{type(error).__name__}: {lines[0]}; profile it instead, or exclude it"
        ) from error
    trained = _num_bytes_of(parameter for parameter in fake.parameters() if parameter.requires_grad)
    return ModuleCounts(
        batch=_rows(sizes, results.rows, likely) if batch is None else batch,
        forward=PhaseCounts(operators=merge_equal(tally.phases[0])),
        backward=PhaseCounts(operators=merge_equal(tally.phases[1])),
        memory=MemoryCounts(
            parameter_bytes=_num_bytes_of(fake.parameters()),
            buffer_bytes=_num_bytes_of(fake.buffers()),
            gradient_bytes=trained,
            optimizer_bytes=2 * trained,  # AdamW's two moments have the parameter's dtype
            activation_bytes=sum(tally.saved.values()),
            forward_peak_bytes=tally.forward_peak_bytes,
            backward_peak_bytes=tally.memory.peak_bytes if tally.phases[1] else 0,
        ),
        result_bytes=results.num_bytes,
        result_gradient_bytes=results.gradient_bytes,
    )


def _run(
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    recorder: Recorder,
    functions: AbstractContextManager[Any],
    settings: Settings,
) -> _Results:
    tally = recorder.tallies[-1]
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: _release_gradient(recorder, p))
    with functions, torch.enable_grad(), recorder, hooks, settings():
        results = tensors_of(module(*args, **kwargs))
    tally.start_backward()
    trained = [result for result in results if result.requires_grad]
    described = _Results({len(r) for r in results if r.dim()}, _num_bytes_of(results), _num_bytes_of(trained))
    results = []
    if trained:
        gradients = [torch.empty_like(result) for result in trained]
        with functions, recorder:
            torch.autograd.backward(trained, gradients)
    return described


def _casts(settings: Settings | None) -> bool:
    with settings() if settings is not None else nullcontext():
        return torch.is_autocast_enabled("cpu")


def _release_gradient(recorder: Recorder, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        recorder.tallies[-1].memory.release(parameter.grad)


def count_degrees(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    degrees: Sequence[int] = (1, 2, 4, 8, 16, 32),
    target: KernelsOf = "cuda",
    settings: Settings | None = None,
    autocast: torch.dtype | None = None,
    layers: LayerCounts | None = None,
) -> dict[int, ModuleCounts]:
    """Counts a module at several data-parallel degrees; at degree d a device has ceil(B/d) of B samples.

    Each degree is counted separately, because not all work scales with the batch. Degrees above B are omitted. A degree
    at which the module rejects its part of the batch is omitted with a warning.

    Args:
        module, args, kwargs, target, settings, autocast, layers: See ``count_module``; the batch is the most frequent
            first dimension of the arguments that results have too.
        degrees: Degrees to count, in addition to 1.

    Raises:
        UnsupportedModelError: See ``count_module``.
    """
    layers = {} if layers is None else layers
    count = partial(
        count_module, module, args, kwargs, target=target, settings=settings, autocast=autocast, layers=layers
    )
    full_batch = count()
    counted = {1: full_batch}
    for degree in sorted(set(degrees) - {1}):
        if 1 <= degree <= full_batch.batch:
            try:
                counted[degree] = count(batch=-(-full_batch.batch // degree), rows=full_batch.batch)
            except UnsupportedModelError as error:
                _log.warning("degree %d is omitted: %s", degree, error)
    return counted


def _num_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rows(sizes: Mapping[int, int], results: Collection[int], likely: int) -> int:
    """Returns the number of samples in arguments; results must have it too, unlike the rows of position tables."""
    both = {size: count for size, count in sizes.items() if size in results}
    return likely if likely in both or not both else max(both, key=lambda size: both[size])


class _FakeCopies(TorchFunctionMode):
    """Makes deep copies without data; shared tensors stay shared.

    Args:
        mode: Mode of the copies, fake CPU tensors; None: meta tensors.
        rows: First dimension of the tensors to resize.
        batch: Their new first dimension; None: no resizing.

    Attributes:
        sizes: Number of tensors by first dimension.
    """

    def __init__(self, mode: FakeTensorMode | None, rows: int = 0, batch: int | None = None) -> None:
        super().__init__()
        self._mode: AbstractContextManager[Any] = nullcontext() if mode is None else mode
        self._device = "meta" if mode is None else "cpu"
        self._rows, self._batch = rows, batch
        self.sizes: Counter[int] = Counter()

    def of(self, value: Any) -> Any:
        """Returns a copy of a module or of nested arguments."""
        memo: dict[int, Any] = {}
        if isinstance(value, nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                memo[id(tensor)] = self._fake(tensor)
        with self:  # makes ``copy.deepcopy`` return fake tensors
            return copy.deepcopy(value, memo)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = tuple(tensor.shape)
        if shape:
            self.sizes[shape[0]] += 1
            if self._batch is not None and shape[0] == self._rows:
                shape = (self._batch, *shape[1:])
        with torch._C.DisableTorchFunction(), self._mode:
            if tensor.layout is not torch.strided:
                empty = torch.empty(shape, dtype=tensor.dtype, device=self._device)
            else:
                empty = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(empty, requires_grad=tensor.requires_grad)
            return empty.requires_grad_(tensor.requires_grad)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
