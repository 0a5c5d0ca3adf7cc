"""A module with its inputs in the model: the work that a measurement repeats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from mosaic.cost.communication import ModuleTraffic
from mosaic.errors import UnsupportedModelError
from mosaic.find.structure import flatten, map_tensors, tensors_in, unflatten
from mosaic.profile import Phase

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Subject:
    """One module and the arguments of one of its calls."""

    name: str
    """Name in the graph."""
    module: nn.Module
    """The user's module, in its training mode."""
    args: tuple[Any, ...]
    """Arguments with tensors on the backend's device."""
    kwargs: dict[str, Any]
    settings: Callable[[], Any] | None = None
    """Returns a context of the caller's gradient mode and autocast; None: defaults."""
    batch: int | None = None
    """Number of samples, if it was determined; None: the leading dimension of all tensors."""

    @property
    def gradient_bytes(self) -> int:
        return sum(p.nbytes for p in self.module.parameters() if p.requires_grad)

    def call(self) -> Any:
        """Calls the module in its settings on detached aliases of its tensors."""
        leaves, spec = flatten((self.args, self.kwargs))  # rebuilt each time because a module may write into its lists
        leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = unflatten(leaves, spec)
        with self.settings() if self.settings is not None else nullcontext():
            return self.module(*args, **kwargs)

    def forward(self) -> list[torch.Tensor]:
        """Calls the module; returns the differentiable results."""
        try:
            result = self.call()
        finally:  # as at the end of a step: another lane's call must not reuse this call's cast weights
            torch.clear_autocast_cache()
        return [tensor for tensor in tensors_in(result) if tensor.requires_grad]

    def backward(self, outputs: list[torch.Tensor], *, keep: bool = False) -> None:
        """Runs backward from ``outputs`` with gradients of one, then drops the parameters' gradients."""
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs], retain_graph=keep)
        for parameter in self.module.parameters():
            parameter.grad = None

    def prepare(self, phase: Phase) -> Callable[[], object] | None:
        """Returns one repetition of a phase, or None. May run the other phase: call it on the repetitions' lane."""
        if phase is Phase.FORWARD:
            return lambda: bool(self.forward())  # bool releases the result and its graph
        outputs = self.forward()
        return partial(self.backward, outputs, keep=True) if outputs else None

    def activation_bytes(self) -> int:
        """Runs a step; returns the bytes saved for backward, without parameters."""
        own = {tensor.untyped_storage().data_ptr() for tensor in self.module.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.backward(self.forward())
        return sum(saved.values())

    def peak_bytes(self, device: torch.device) -> tuple[int, int]:
        """Runs a step; returns the peak bytes of forward and backward above those before each phase.

        On the host both are the bytes saved by forward. On a GPU this resets torch's peak statistics.
        """
        if device.type != "cuda":
            return (self.activation_bytes(),) * 2

        def peak_of(work: Callable[[], _T]) -> tuple[_T, int]:
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)  # the allocator counts requests: no synchronization
            return work(), max(0, torch.cuda.max_memory_allocated(device) - before)

        outputs, forward_bytes = peak_of(self.forward)
        return forward_bytes, peak_of(lambda: self.backward(outputs))[1]


def batch_of(subject: Subject, purpose: str) -> int:
    """Returns the number of samples of a module's batch: the common leading dimension of its tensors.

    Raises UnsupportedModelError without one; the message says that the module cannot be ``purpose``.
    """
    if subject.batch is not None:
        return subject.batch
    tensors = tensors_in((subject.args, subject.kwargs))
    sizes = {len(tensor) for tensor in tensors if tensor.dim() > 0}
    wide = sizes - {1} or sizes
    if len(wide) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise UnsupportedModelError(
            f"{subject.name!r} cannot be {purpose}: its inputs ({shapes}) have no common leading "
            "dimension; profile it at degree 1"
        )
    return wide.pop()


def split_batch(subject: Subject, degree: int) -> Subject:
    """Returns a module with the inputs of one of ``degree`` replicas: ceil(B/d) of the B samples.

    Tensors of another leading size and scalars are not split. Raises UnsupportedModelError without a common leading
    dimension, or for fewer samples than replicas.
    """
    if degree == 1:
        return subject
    batch = batch_of(subject, f"split over {degree} devices")
    if batch < degree:
        raise UnsupportedModelError(
            f"{subject.name!r} has a batch of {batch}, less than one sample for each of {degree} devices"
        )
    share = -(-batch // degree)
    return _with_batch(subject, batch, share, lambda tensor: tensor[:share].clone())


def repeat_batch(subject: Subject, times: int) -> Subject:
    """Returns a module with ``times`` as many samples; raises UnsupportedModelError without a leading dimension."""
    if times == 1:
        return subject
    batch = batch_of(subject, f"repeated {times} times")
    return _with_batch(subject, batch, times * batch, lambda tensor: tensor.repeat(times, *[1] * (tensor.dim() - 1)))


def _with_batch(subject: Subject, batch: int, new: int, make: Callable[[torch.Tensor], torch.Tensor]) -> Subject:
    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or len(tensor) != batch:
            return tensor
        return make(tensor.detach()).requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(resized, (subject.args, subject.kwargs))
    return dataclasses.replace(subject, args=args, kwargs=kwargs, batch=subject.batch and new)


def traffic_of(subject: Subject, *, batch: int | None = None, results: tuple[int, int] | None = None) -> ModuleTraffic:
    """Returns the bytes of a module's arguments, results and gradients sent between ranks, for its batch.

    ``results`` are the bytes of its results and of the differentiable ones; by default its forward runs once. Raises
    UnsupportedModelError without ``batch`` if its arguments have no common one.
    """
    batch = batch_of(subject, "split over ranks") if batch is None else batch
    arguments = [t for t in tensors_in((subject.args, subject.kwargs)) if t.dim() > 0 and len(t) == batch]
    if results is None:
        with torch.enable_grad():
            tensors = tensors_in(subject.call())
        results = _num_bytes(tensors), _num_bytes(t for t in tensors if t.requires_grad)
    return ModuleTraffic(
        arguments=_num_bytes(arguments),
        results=results[0],
        argument_gradients=_num_bytes(t for t in arguments if t.requires_grad),
        result_gradients=results[1],
        parameter_gradients=subject.gradient_bytes,
    )


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
