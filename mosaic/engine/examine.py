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


@dataclass(frozen=True, slots=True)
class Examination:
    """The modules of a model, with those that feed them, and the obstacles to placing them, with their remedies."""

    modules: dict[str, tuple[str, ...]]
    refused: dict[str, str]
    in_place: dict[str, str]


def examine(model: nn.Module, sample: Sample, *, origin: str) -> Examination:
    """Runs a model on ``sample`` and says what colocating would find; the model is left as it was."""
    try:
        refuse(model, backend_for(model))
        finding = find_modules(model, sample)
    except (BackendUnavailableError, UnsupportedModelError) as error:
        return Examination({}, {f"the model: {error} ({origin})": "name modules, or change these"}, {})
    except Exception as error:
        sentence = _failure(error.__cause__ or error, origin)
        return Examination({}, {sentence: "let the factory return a sample that the model takes"}, {})
    sources = {name: tuple(e.source for e in finding.graph.edges if e.target == name) for name in finding.graph.names}
    in_place = {}
    for name, reason in (*finding.left_out.items(), *finding.in_place.items()):
        kind = type(model.get_submodule(name))
        code = None if ".py:" in reason else getattr(kind.forward, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno} in {kind.__qualname__})" if code is not None else ""
        in_place[f"{name}: {reason}{where}"] = reason.remedy
    return Examination(sources, {}, in_place)


def _failure(error: BaseException, origin: str) -> str:
    torch_folder = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(torch_folder)]
    own = [frame for frame in frames if f"mosaic{Path('/')}engine" not in frame.filename]
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else origin
    return f"the model: it does not run on the sample: {type(error).__name__}: {error} ({where})"
