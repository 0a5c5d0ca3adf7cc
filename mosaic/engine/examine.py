"""Looking at a model before it is colocated: what would be placed, what would not, and what to do about that."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mosaic.engine.finding.find import Sample, find_modules
from mosaic.engine.session import backend_for, refuse
from mosaic.errors import BackendUnavailableError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """An observation about a module."""

    module: str
    what: str
    where: str
    """File, line and function of the user's code; empty where ``what`` has it."""
    todo: str
    """The remedy."""

    @property
    def seen(self) -> str:
        return f"{self.module}: {self.what}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True, slots=True)
class Examination:
    """The modules of a model and the obstacles to placing them."""

    modules: dict[str, tuple[str, ...]]
    refused: tuple[Remark, ...]
    in_place: tuple[Remark, ...]


def examine(model: nn.Module, sample: Sample, *, origin: str) -> Examination:
    """Runs a model on ``sample`` and says what colocating would find; the model is left as it was."""
    try:
        refuse(model, backend_for(model))
        finding = find_modules(model, sample)
    except (BackendUnavailableError, UnsupportedModelError) as error:
        problem = Remark(module="the model", what=str(error), where=origin, todo="name modules, or change these")
        return Examination({}, (problem,), ())
    except Exception as error:
        return Examination({}, (_failed(error.__cause__ or error, origin),), ())
    sources = {name: tuple(e.source for e in finding.graph.edges if e.target == name) for name in finding.graph.names}
    left_out = []
    for name, reason in finding.left_out.items():
        where = "" if ".py:" in reason else _class_of(model.get_submodule(name))
        left_out.append(Remark(module=name, what=reason, where=where, todo=reason.todo))
    in_place = (
        Remark(module=name, what=reason, where=_class_of(model.get_submodule(name)), todo=reason.todo)
        for name, reason in finding.in_place.items()
    )
    return Examination(sources, (), (*left_out, *in_place))


def _class_of(module: nn.Module) -> str:
    code = getattr(type(module).forward, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} in {type(module).__qualname__}"


def _failed(error: BaseException, origin: str) -> Remark:
    torch_folder = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(torch_folder)]
    own = [frame for frame in frames if f"mosaic{Path('/')}engine" not in frame.filename]
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else origin
    return Remark(
        module="the model",
        what=f"it does not run on the sample: {type(error).__name__}: {error}",
        where=where,
        todo="let the factory return a sample that the model takes",
    )
