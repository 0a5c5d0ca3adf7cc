"""Loads a user's model from ``FILE:FACTORY``, or a model of the zoo from ``zoo:NAME-SIZE[:BATCH[:TASK,TASK]]``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.engine.finding.find import runner_of
from mosaic.errors import MosaicError
from mosaic.user_file import import_function

ZOO = "zoo:"
TINY_BATCH, BATCH = 4, 16
"""Default batch sizes of the zoo; ``BATCH`` is the paper's for a single node (section 5.1)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Result of a factory."""

    model: nn.Module
    sample: Any
    """One batch: keywords, positions or a tensor."""
    loss: Callable[[Any], torch.Tensor]
    """From the model's output to a scalar."""
    modules: tuple[str, ...] | None = None
    """Names or patterns of the modules to place; None: found by tracing."""
    batch: int | None = None
    """Number of samples; None if only the tensors define it."""


class Loop:
    """A plain training loop over one batch; the optimizer is AdamW with a small learning rate."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._call = runner_of(workload.model, workload.sample)
        parameters = [p for p in workload.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, 1e-5) if parameters else None

    def steps(self, count: int) -> list[float]:
        """Takes ``count`` steps; returns their wall times in milliseconds."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            loss = self._workload.loss(self._call())
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                text = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
                raise MosaicError(f"the loss is {text}; let the factory return a function to a scalar tensor")
            if self._optimizer is not None:
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
            loss.item()  # synchronizes a GPU
            times.append((time.perf_counter() - start) * 1e3)
        return times


def plain_loop(where: str) -> Loop:
    """Returns a user's plain loop, for a child process (``mosaic.child``)."""
    return Loop(load_workload(where))


def load_workload(
    where: str, *, device: torch.device | None = None, sample_device: torch.device | None = None
) -> Workload:
    """Imports FILE, calls FACTORY and checks its result; or builds a model of the zoo.

    Args:
        where: ``FILE:FACTORY``, or ``zoo:NAME-SIZE[:BATCH[:TASK,TASK]]``, such as ``zoo:qwen3-vl-paper:8``; a model of
            several tasks gets this number of samples of each.
        device: Device of a zoo model, the CPU by default; a factory's model stays on its device.
        sample_device: Device of its batch; ``device`` by default.

    Raises:
        ValueError: ``where`` has neither form, or the zoo has no such model.
        MosaicError: The factory is missing, fails, or returns something else.
    """
    if where.startswith(ZOO):
        device = device or torch.device("cpu")
        return _from_zoo(where, device, sample_device or device)
    factory = import_function(where, otherwise="zoo:clip-tiny")
    try:
        result = factory()
    except Exception as error:  # of any kind: the user's code runs
        raise MosaicError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        rule = "return (model, sample) or (model, sample, loss)"
        raise MosaicError(f"{where} returned {type(result).__name__}; {rule}")
    model, sample, *loss = result
    if not isinstance(sample, dict | list | tuple | torch.Tensor):
        kind = type(sample).__name__
        raise MosaicError(f"{where} returned a sample of type {kind}; use a dict, tuple, list or tensor")
    if loss and not callable(loss[0]):
        raise MosaicError(f"{where} returned a loss of type {type(loss[0]).__name__}; use a function of the output")
    return Workload(model, sample, *(loss or [mean_square]))


def _from_zoo(where: str, device: torch.device, sample_device: torch.device) -> Workload:
    from mosaic import models

    spec, _, suffix = where.removeprefix(ZOO).partition(":")
    batch, _, tasks = suffix.partition(":")
    name, _, size = spec.rpartition("-") if "-" in spec else (spec, "", "")
    if spec in models.MODELS:
        sizes = ", ".join(models.MODELS[spec].sizes)
        raise ValueError(f"{where!r} names no size; use zoo:{spec}-SIZE with one of: {sizes}")
    count = TINY_BATCH if size == "tiny" else BATCH
    if batch:
        count = int(batch) if batch.isdecimal() else 0
    if count < 1:
        raise ValueError(f"batch={batch!r} in {where!r}; use 1 or more, as in zoo:clip-tiny:8")
    try:
        model = models.build(name, size, device=device)
        selected_tasks = tasks.split(",") if tasks else None
        sample = models.make_batch(name, size, batch=count, device=sample_device, tasks=selected_tasks)
    except (ValueError, RuntimeError) as error:  # RuntimeError: a batch that torch cannot allocate
        raise ValueError(f"{where!r} is not zoo:NAME-SIZE: {error}") from error
    return Workload(model, sample, models.loss_of, models.find_model(name).modules, count)


def moved(sample: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), sample)


def mean_square(output: Any) -> torch.Tensor:
    """Returns the mean square of all differentiable outputs: a loss for timing."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tensors:
        raise MosaicError("the model returns no differentiable tensor; let the factory also return a loss")
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()
