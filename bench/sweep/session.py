"""A run of a case: the recorded values of its loop, and its colocated models."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mosaic
from bench.sweep.device import device
from mosaic.backends.base import Backend
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.host.backend import HostBackend
from mosaic.demo.run import one_slot_plan
from mosaic.engine import Handle, Options, find_modules
from mosaic.errors import MosaicError
from mosaic.graph import ModuleGraph

_TOP = Path(__file__).resolve().parent.parent.parent


class RefusedError(Exception):
    """Mosaic cannot place a model's modules."""


class PlainHandle:
    """The handle of a plain model."""

    def disabled(self) -> nullcontext[None]:
        return nullcontext()

    def remove(self) -> None:
        """Does nothing."""


@dataclass
class Session:
    """The argument of a case's loop; a case runs once with ``on_lanes`` and once without."""

    on_lanes: bool
    """True: ``colocate`` colocates; False: it leaves the model as it is."""
    graphs: bool = False
    """True: lanes of a GPU launch modules as CUDA graphs."""
    noted: dict[str, Any] = field(default_factory=dict)
    """The loop's values, by a name with their number."""
    models: list[nn.Module] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    """The handles of colocated models, also of those that are removed."""

    def colocate(self, model: nn.Module, sample: Any) -> Handle | PlainHandle:
        """Moves a model to the device and places all modules; independent modules run side by side.

        Raises:
            RefusedError: Mosaic refuses.
        """
        if all(model is not known for known in self.models):
            self.models.append(model)
        model.to(device())
        if not self.on_lanes:
            return PlainHandle()
        try:
            graph = find_modules(model, sample).graph
            backend = _backend(graph)
            plan = one_slot_plan(graph, backend.device)
            options = Options(cache=None, cuda_graphs=self.graphs)
            handle = mosaic.colocate(model, sample, plan=plan, backend=backend, options=options)
        except MosaicError as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        self.handles.append(handle)
        return handle

    def note(self, *values: Any) -> None:
        """Records values of the loop: tensors and plain data."""
        for value in values:
            self.noted[f"value {len(self.noted)}"] = comparable(value)

    def note_models(self) -> None:
        """Records parameters, gradients and buffers of all models."""
        for index, model in enumerate(self.models):
            of = f" of model {index}" if len(self.models) > 1 else ""
            for name, parameter in model.named_parameters():
                self.noted[f"{name}{of}"] = comparable(parameter)
                self.noted[f"gradient of {name}{of}"] = comparable(parameter.grad)
            for name, buffer in model.named_buffers():
                self.noted[f"buffer {name}{of}"] = comparable(buffer)

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    """Unique."""
    kind: str
    run: Callable[[Session], None] | None = None
    """Makes a model, colocates it by the session, trains it and notes the losses."""
    told: str = ""
    """The line of ``describe()`` on an expected difference; empty where none is expected."""


class CaughtModel(BaseException):
    """Ends a loop at its call of ``colocate``."""

    def __init__(self, model: nn.Module, sample: Any) -> None:
        super().__init__()
        self.model, self.sample = model, sample

    def arguments(self) -> dict[str, Any]:
        """Returns the sample as keyword arguments.

        Raises:
            TypeError: The model's forward does not accept keywords.
        """
        if isinstance(self.sample, Mapping):
            return dict(self.sample)
        args = self.sample if isinstance(self.sample, tuple) else (self.sample,)
        return dict(inspect.signature(self.model.forward).bind(*args).arguments)


class CatchingSession(Session):
    """Runs a loop up to its call of ``colocate``."""

    def colocate(self, model: nn.Module, sample: Any) -> Handle | PlainHandle:
        raise CaughtModel(model, sample)


def _backend(graph: ModuleGraph) -> Backend:
    """Returns the device's backend; on the host with one single-threaded lane per module."""
    if device().type == "cuda":
        return CudaBackend(device().index or 0)
    return HostBackend(num_slots=max(2, len(graph.names)), num_threads=1)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def without_folders(text: str) -> str:
    """Returns text with paths relative to the repository and its packages."""
    return re.sub(r"[^\s(]*/site-packages/", "", text.replace(f"{_TOP}/", ""))


def comparable(value: Any) -> Any:
    """Returns a copy for comparison, with equal NaNs in tensors."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = (value.detach().to_dense() if value.layout != torch.strided else value.detach()).clone()
    real = torch.view_as_real(copy.resolve_conj()) if copy.is_complex() else copy
    return real.masked_fill(real.isnan(), torch.nan) if real.is_floating_point() else real


def difference(plain: Session, ours: Session, *, share: float = 0.0) -> str:
    """Returns the first difference of two runs of a case; empty where there is none.

    Numbers may differ by a ``share`` of their tensor's largest; 0 compares bits.
    """
    if plain.noted.keys() != ours.noted.keys():
        return f"noted {len(ours.noted)} values, plain {len(plain.noted)}"
    wrong = [name for name, theirs in plain.noted.items() if not _same(theirs, ours.noted[name], share)]
    if not wrong:
        return ""
    own, theirs = ours.noted[wrong[0]], plain.noted[wrong[0]]
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    first = f"{wrong[0]}: {_shown(own)}, plain {_shown(theirs)}{_distance(own, theirs)}"
    return f"{first}{more} of {len(plain.noted)}"


def _same(plain: Any, ours: Any, share: float) -> bool:
    if share and isinstance(plain, float) and isinstance(ours, float):
        plain, ours = torch.tensor(plain), torch.tensor(ours)
    if not isinstance(plain, torch.Tensor) or not isinstance(ours, torch.Tensor):
        return type(plain) is type(ours) and repr(plain) == repr(ours)  # the shortest text that gives a float's bits
    if plain.dtype != ours.dtype or plain.shape != ours.shape:
        return False
    if share and plain.is_floating_point() and plain.numel():
        largest = float(plain.nan_to_num().abs().max())
        return torch.allclose(ours, plain, rtol=share, atol=share * max(largest, 1e-3), equal_nan=True)
    return torch.equal(plain.contiguous().flatten().view(torch.uint8), ours.contiguous().flatten().view(torch.uint8))


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)[:40]
    return f"{value.item():.9g}" if value.numel() == 1 else f"{tuple(value.shape)} {value.dtype}"


def _distance(ours: Any, plain: Any) -> str:
    if not (isinstance(ours, torch.Tensor) and isinstance(plain, torch.Tensor)) or ours.shape != plain.shape:
        return ""
    return f", by up to {(ours.double() - plain.double()).abs().max():.3g}" if ours.numel() else ""
