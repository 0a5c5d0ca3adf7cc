"""Looking at a model before it is colocated: what would be placed, what would not, and what to do about that."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.signature import Arguments, learn
from mosaic.engine.finding.exchanges import Remark
from mosaic.engine.finding.find import Finding, Sample, find_modules, wrapped_parts
from mosaic.errors import UnsupportedModelError
from mosaic.find.restore import preserved


@dataclass(frozen=True, slots=True)
class Examination:
    """The modules of a model and the obstacles to placing them."""

    modules: dict[str, tuple[str, ...]]
    refused: tuple[Remark, ...]
    in_place: tuple[Remark, ...]
    to_know: tuple[Remark, ...]


def examine(model: nn.Module, sample: Sample, *, origin: str) -> Examination:
    """Runs a model a few times on ``sample`` and says what colocating would find; the model is left as it was."""
    refused = [
        Remark(module=name or "the model", what=f"is a {kind}, applied already", where=origin, todo=todo)
        for name, kind, todo in wrapped_parts(model)
    ]
    refused += _devices(model, origin)
    if refused:
        return Examination({}, tuple(refused), (), ())
    try:
        finding = find_modules(model, sample)
    except UnsupportedModelError as error:
        problem = Remark(module="the model", what=str(error), where=origin, todo="name modules, or change these")
        return Examination({}, (problem,), (), ())
    except Exception as error:
        return Examination({}, (_failed(error.__cause__ or error, origin),), (), ())
    sources = {name: tuple(e.source for e in finding.graph.edges if e.target == name) for name in finding.graph.names}
    left_out = []
    for name, reason in finding.left_out.items():
        where = "" if ".py:" in reason else _class_of(model.get_submodule(name), "")
        left_out.append(Remark(module=name, what=reason, where=where, todo=reason.todo))
    return Examination(sources, (), (*left_out, *_obstacles(model, finding)), finding.remarks)


def _obstacles(model: nn.Module, finding: Finding) -> list[Remark]:
    """Runs each module once more, as its first call in the loop will, and says what keeps it from its lane."""
    remarks = []
    for subject in finding.subjects:
        settings: Any = subject.settings() if subject.settings is not None else nullcontext()
        with preserved(model, alone=(subject,)), settings:
            arguments = Arguments.take(subject.args, subject.kwargs)
            parted = finding.parted.get(subject.name, frozenset())
            call = partial(subject.module, *subject.args, **subject.kwargs)
            signature = learn(call, arguments, subject.module, parted)[2]
        if (obstacle := signature.obstacle) is not None:
            where = finding.places[subject.name]
            remarks.append(Remark(module=subject.name, what=obstacle, where=where, todo=obstacle.todo))
    return remarks


def _devices(model: nn.Module, origin: str) -> list[Remark]:
    first: torch.device | None = None
    remarks = []
    for name, part in model.named_modules():
        for path, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            first = first or tensor.device
            if tensor.device != first:
                what = f"its {path} is on {tensor.device}, where the model begins on {first}"
                todo = f"move it: {name}.to('{first}'); a plan gives modules shares of one device"
                remarks.append(Remark(module=name or "the model", what=what, where=_class_of(part, origin), todo=todo))
                break
    return remarks


def _class_of(module: nn.Module, otherwise: str) -> str:
    code = getattr(type(module).forward, "__code__", None)
    return otherwise if code is None else f"{code.co_filename}:{code.co_firstlineno} in {type(module).__qualname__}"


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
